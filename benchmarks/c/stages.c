/* stages.c: two stages of the engine, the matrix product and the router, on memory that the caller lays out; a shared library for
 * the scripts of claims/. It is compiled together with the few files of the engine that it needs, and with one table of kernels
 * instead of all, so that it is there within seconds. */
#include <stdlib.h>

#include "../../csrc/core/router.h"
#include "../../csrc/kernels/tables.h"
#include "clock.h"

#if defined(__x86_64__)
#define TABLE kernels_avx2
#else
#define TABLE kernels_neon
#endif

const kernels *kernels_in_force(void) { return &TABLE; }

/* Seconds of the products of x [m, cols], m <= MATMUL_ROWS, with each of `count` matrices, one after the other; -1: no memory. All
 * have the same cols, but for m = 1: a single row is not packed. */
double matmul_seconds(const matrix *matrices, int64_t count, const float *x, int64_t m, float *out) {
    const int64_t cols = matrices[0].cols;
    float *scratch = malloc(sizeof(float) * (size_t)(matmul_scratch(cols) + packed_floats(m, cols)));
    if (scratch == NULL) return -1.0;
    float *packed = scratch + matmul_scratch(cols);
    if (m > 1) TABLE.pack(packed, x, cols, m, cols);
    const double begin = now();
    for (int64_t i = 0; i < count; i++) {
        const matrix *w = &matrices[i];
        TABLE.matmul(out, w->rows, m > 1 ? packed : x, m, w, NULL, 0, w->rows, scratch);
    }
    const double seconds = now() - begin;
    free(scratch);
    return seconds;
}

/* Seconds of the router for x [tokens, w->cols], one token after the other as in decoding. `product_alone`: without choice and
 * gates. */
double route_seconds(const matrix *w, const float *x, int64_t tokens, int64_t top_k, int gates, int product_alone) {
    static _Alignas(64) unsigned char scratch[32 * COLIBRI_MAX_EXPERTS];
    static float logits[COLIBRI_MAX_EXPERTS], scores[COLIBRI_MAX_EXPERTS], chosen[COLIBRI_MAX_EXPERTS];
    static int32_t ids[COLIBRI_MAX_EXPERTS];
    machine m;
    if (router_scratch(w->rows) > sizeof scratch || machine_init(&m, 1, NULL) != COLIBRI_OK) return -1.0;
    const router r = {.n_experts = w->rows, .top_k = top_k, .select_by_logits = gates == COLIBRI_GATES_RAW_LOGITS,
                      .gates = (colibri_gate_mode)gates, .scratch = scratch};
    static const matrix no_bias;
    const double begin = now();
    for (int64_t t = 0; t < tokens; t++) {
        const float *row = x + t * w->cols;
        if (product_alone) machine_linear(&m, logits, row, 1, w, &no_bias, COLIBRI_FLOAT32);
        else route(&m, &r, row, 1, w, logits, scores, ids, chosen);
    }
    const double seconds = now() - begin;
    machine_free(&m);
    return seconds;
}
