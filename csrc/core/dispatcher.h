/* dispatcher.h: from "each token names its experts" to "each expert has its rows". */
#ifndef COLIBRI_CORE_DISPATCHER_H
#define COLIBRI_CORE_DISPATCHER_H

#include "machine.h"

/* The packed rows of one pass, n * k for n tokens: expert by expert, tokens ascending within an expert. Slots without an expert
 * (id -1) leave rows at the end that nobody uses. */
typedef struct dispatch {
    int32_t *tokens;  /* [n * k] session row of each packed row, -1 for those that nobody uses */
    int64_t *offsets; /* [E + 1] first packed row of each expert, counted from the first row of the session */
    int64_t *places;  /* [n, k] packed row of each (token, slot), counted from the first row of this pass; -1: none */
} dispatch;

/* ids [n, k] of the tokens first_token .. first_token + n - 1; their packed rows begin at first_row of the session. Returns how
 * many are used. An id outside 0 .. n_experts - 1 is no expert; whatever ids are, nothing is written beyond the arrays. */
int64_t dispatch_plan(const dispatch *d, const int32_t *ids, int64_t n, int64_t k, int64_t n_experts, int64_t first_token,
                      int64_t first_row);

/* packed[r] = x[tokens[r] - first_token] for the n_rows packed rows; both of `width` floats. */
void dispatch_gather(machine *m, float *packed, const float *x, const int32_t *tokens, int64_t first_token, int64_t n_rows,
                     int64_t width);

#endif
