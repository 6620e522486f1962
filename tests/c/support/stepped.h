/* stepped.h: passes that run stage by stage, and what sessions show after them, in one line each. Every call must succeed. */
#ifndef COLIBRI_TESTS_STEPPED_H
#define COLIBRI_TESTS_STEPPED_H

#include "snapshot.h"
#include "tiny_model.h"

enum { N_IDS = 14, N_FAMILIES = 4, N_CAPTURES = 5 };

extern tiny_checkpoint (*const families[N_FAMILIES])(void);
extern const tiny_options captures[N_CAPTURES]; /* from nothing to all, and an odd choice; max_tokens is N_IDS */

void begin(colibri_session *s, const int32_t *ids, int64_t n);
colibri_place step(colibri_session *s);
bool is_open(colibri_session *s);
int finish(colibri_session *s);                                          /* returns the number of steps */
void step_to(colibri_session *s, colibri_stage stage, int64_t layer);    /* until that stage is next */

/* Feeds the ids in two passes, the first of them `first` long. */
snapshot fed(colibri_model *m, const tiny_options *o, const int32_t *ids, int64_t first);
void check_shows(colibri_session *s, const snapshot *expected, const char *what);

colibri_status open_tap(colibri_session *s, const char *path, int64_t layer, int64_t expert, colibri_array *array,
                        colibri_lease **lease, colibri_message *message); /* may fail */

/* The open rows of a kept tap, writable; no lease is held, since the session lives on. */
void *edit(colibri_session *s, const char *path, int64_t layer);

#endif
