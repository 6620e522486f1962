/* views.h: what a session shows: closed rows of its taps, as arrays over the blocks in which they lie. */
#ifndef COLIBRI_CORE_VIEWS_H
#define COLIBRI_CORE_VIEWS_H

#include "session.h"

/* As colibri_session_tap; *holder receives the block of the array with one more reference. */
colibri_status session_tap(session *s, size_t kind, int64_t layer, int64_t expert, int64_t pass, colibri_array *array,
                           block **holder, colibri_message *message);

/* As colibri_session_logits. */
colibri_status session_logits(session *s, colibri_array *array, block **holder, colibri_message *message);

/* A tap and its place are checked against the model; ARGUMENT says what there is instead. */
colibri_status tap_check(const config *c, size_t kind, int64_t layer, int64_t expert, colibri_message *message);

/* NOT_CAPTURED, naming the capture to ask for. */
colibri_status tap_not_captured(tap t, int64_t layer, int64_t expert, colibri_message *message);

/* n_rows rows that lie one after the other. Not for ROWS_HEADS. */
colibri_array tap_array(const config *c, tap t, const void *data, int64_t n_rows);

/* Rows first .. stop - 1 of a kept tap of ROWS_HEADS: these queries over the keys 0 .. stop - 1, head by head. */
colibri_array tap_heads(const session *s, tap t, int64_t layer, int64_t first, int64_t stop);

#endif
