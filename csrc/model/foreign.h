/* foreign.h: files that often lie where weights or JSON should be, recognised by their first bytes. */
#ifndef COLIBRI_MODEL_FOREIGN_H
#define COLIBRI_MODEL_FOREIGN_H

#include "../utils/status.h"

/* What the file is, as the end of a sentence ("a Git LFS pointer, ..."); NULL when it is none of these. n_bytes may be 0. */
const char *foreign_kind(const unsigned char *data, int64_t n_bytes);

#endif
