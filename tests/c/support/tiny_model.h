/* tiny_model.h: a tiny checkpoint opened as a model, and sessions on it, in one line each. */
#ifndef COLIBRI_TESTS_TINY_MODEL_H
#define COLIBRI_TESTS_TINY_MODEL_H

#include "colibri.h"
#include "tiny_checkpoint.h"

typedef struct tiny_options {
    const char *capture[4]; /* patterns up to the first NULL; none: the default */
    int threads;            /* 0: one */
    int64_t max_tokens;
    colibri_gate_mode gates;
    colibri_watch watch;
} tiny_options;

colibri_model *tiny_open(tiny_checkpoint *t);                  /* writes the checkpoint and opens it */
void tiny_close(colibri_model *m, const tiny_checkpoint *t);   /* checks that nobody uses it, and removes the files */

/* A session that spreads even the smallest piece of work over its threads. */
colibri_session *tiny_session(colibri_model *m, const tiny_options *o);

void tiny_ids(int32_t *ids, int64_t n, const tiny_checkpoint *t, uint64_t seed);
void tiny_feed(colibri_session *s, const int32_t *ids, int64_t n);

/* The array of a tap by its path with {l} and {e}; every call must succeed. */
colibri_array tiny_tap(colibri_session *s, const char *path, int64_t layer, int64_t expert, int64_t pass, colibri_lease **lease);
size_t tiny_kind(const char *path);

#endif
