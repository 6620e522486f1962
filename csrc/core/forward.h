/* forward.h: one pass over the model: its stages in their order, all at once or one by one. */
#ifndef COLIBRI_CORE_FORWARD_H
#define COLIBRI_CORE_FORWARD_H

#include "session.h"

/* Computes the next n tokens into the session's rows and the logits of the last one into next_logits (into the tape where kept).
 * The ids are valid and fit. False when the progress callback asked to stop, or the boundary `found` what ends the
 * pass: the session's closed rows are as they were. */
bool forward(session *s, const int32_t *ids, int64_t n);

/* The order of stages, and one of them, over the session's tile. At COLIBRI_STAGE_EXPERT, expert is -1 for all of them. */
colibri_place first_place(void);
colibri_place place_after(const session *s, colibri_place p); /* COLIBRI_STAGE_NONE after the logits */
bool run_stage(session *s, colibri_place p);                  /* false: stopped, or its boundary found what ends the pass */

/* What the progress callback is told: the share of (token, layer) pairs behind us; the logits count as one layer more. */
double pass_done(const session *s, colibri_place p);

#endif
