/* forward.h: one pass over the model. */
#ifndef COLIBRI_CORE_FORWARD_H
#define COLIBRI_CORE_FORWARD_H

#include "session.h"

/* Computes the next n tokens into the session's rows and the logits of the last one into next_logits (into the tape where kept).
 * The ids are valid and fit. False when the progress callback asked to stop: the session's closed rows are as they were. */
bool forward(session *s, const int32_t *ids, int64_t n);

#endif
