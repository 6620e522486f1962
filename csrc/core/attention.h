/* attention.h: causal attention with a KV cache, optionally over a window of the last keys. */
#ifndef COLIBRI_CORE_ATTENTION_H
#define COLIBRI_CORE_ATTENTION_H

#include "../model/weights.h"
#include "machine.h"

typedef struct attention_rows {
    const float *norm; /* [n, H] in: the normalised residual */
    float *q;       /* [n, heads, head_dim] out: after rotation */
    float *k, *v;   /* [n, kv_heads, head_dim] out: rows start .. start + n - 1 of the cache */
    const float *all_k, *all_v; /* [start + n, kv_heads, head_dim] the cache from its first row */
    float *context; /* [n, heads, head_dim] out: weighted sums of values */
    float *out;     /* [n, H] out: after the output projection */
    float *weights; /* out: the probability that query (head, t) gives key s is at head * weights_head + t * weights_row + s; */
    int64_t weights_head, weights_row, weights_thread; /* as scratch: a row for each head of a single token, or for each thread */
    const float *cos, *sin; /* [n, head_dim / 2] of the positions start .. start + n - 1 */
} attention_rows;

/* The tokens start .. start + n - 1 attend to themselves and to what came before, at most `window` keys each (0: all). */
void attend(machine *m, const config *c, const layer_weights *w, int64_t window, int64_t start, int64_t n,
            const attention_rows *rows);

/* cos and sin [n, head_dim / 2] of the positions start .. start + n - 1. */
void rotary_rows(machine *m, const config *c, const float *inv_freq, int64_t start, int64_t n, float *cos, float *sin);

#endif
