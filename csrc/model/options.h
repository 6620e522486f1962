/* options.h: reading one JSON object of options strictly: typed, in range, and nothing left unread.
 *
 * Each getter notes that its key was looked at; options_finish then refuses, by name, every key that nobody looked at, unless it
 * cannot change a number: its name begins with '_', its value is null, false, or empty, or it is on the list of harmless keys. So
 * a key that the engine does not know can never be dropped silently. */
#ifndef COLIBRI_MODEL_OPTIONS_H
#define COLIBRI_MODEL_OPTIONS_H

#include "../utils/status.h"
#include "json.h"

#define OPTIONS_MAX_SEEN 64 /* keys that one object's readers look at */

typedef struct options {
    const json_node *object;
    const char *path;  /* of the file, for messages */
    const char *owner; /* "" for the root, "rope_scaling." below it */
    colibri_message *message;
    const json_node *seen[OPTIONS_MAX_SEEN];
    int n_seen;
} options;

/* The value of key; NULL when absent or null. */
const json_node *options_find(options *o, const char *key);

/* Each writes `otherwise` when the key is absent or null, and refuses (FORMAT) another type or a value outside [least, most]. */
colibri_status options_integer(options *o, const char *key, int64_t otherwise, int64_t least, int64_t most, int64_t *out);
colibri_status options_real(options *o, const char *key, double otherwise, double *out);     /* finite, as JSON numbers are */
colibri_status options_positive(options *o, const char *key, double otherwise, double *out); /* > 0 */
colibri_status options_boolean(options *o, const char *key, bool otherwise, bool *out);
colibri_status options_text(options *o, const char *key, const char *otherwise, const char **out);

/* "config.json: key = value: what" */
colibri_status options_refuse(const options *o, const json_node *value, colibri_status status, const char *what);

colibri_status options_finish(const options *o, const char *const *harmless, size_t n_harmless);

#endif
