/* colibri_config.h: every build-time ceiling of the engine, in one place.
 * A checkpoint that exceeds one is refused by name when it is opened. */
#ifndef COLIBRI_CONFIG_H
#define COLIBRI_CONFIG_H

#ifndef COLIBRI_MAX_EXPERTS
#define COLIBRI_MAX_EXPERTS 1024 /* experts in one layer */
#endif

#ifndef COLIBRI_MAX_LAYERS
#define COLIBRI_MAX_LAYERS 1024
#endif

#define COLIBRI_MAX_THREADS 256
#define COLIBRI_MAX_HEADER_BYTES 100000000 /* of one safetensors file; the reference reader's own limit */
#define COLIBRI_MAX_JSON_DEPTH 64
#define COLIBRI_MESSAGE_SIZE 2048

#endif
