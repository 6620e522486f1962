/* experts.h: feed-forward networks over contiguous rows. y = down( silu(gate x) * (up x) ), no biases.
 *
 * Experts without rows are never touched. A shared expert or a dense layer is the case of one network that has all rows. */
#ifndef COLIBRI_CORE_EXPERTS_H
#define COLIBRI_CORE_EXPERTS_H

#include "../model/weights.h"
#include "boundary.h"

/* Rows [n, H] in, [n, I] between, [n, H] out. The three buffers between may belong to a tap or be scratch. */
typedef struct ffn_rows {
    const float *input;
    float *gate, *up, *hidden;
    float *output;
    const int32_t *tokens; /* the session's token of each row; NULL: tokens of the tile from this one on: */
    int64_t first_token;
    point points; /* what gate, up, hidden and output are: this point and the three after it */
} ffn_rows;

/* Rows first <= r < last, of which network e has those with offsets[e] <= r < offsets[e + 1]. The pointers of `rows` stand at
 * row `first`. */
void ffn_run(machine *m, const ffn_weights *networks, int64_t n_networks, const int64_t *offsets, int64_t first, int64_t last,
             const ffn_rows *rows);

#endif
