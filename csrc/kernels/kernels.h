/* kernels.h: the contract of every numeric kernel, and the table of pointers that one ladder fills once per process.
 *
 * kernels_scalar.c is the definition of the numbers; every other table gives the same bytes for the same input (but for the sign
 * and payload of a NaN).
 *
 *   dot(a, b, n)   16 partial sums s[0..15] starting at +0; element i goes to s[i % 16] by fused multiply-add in index order
 *                  (lanes beyond the end of the row take part in no arithmetic); then fold 16 -> 8 -> 4 -> 2 -> 1,
 *                  lane j plus lane j + n/2.
 *   sum16          a plain sum by the same lanes and the same fold.
 *   exp            our own, <= 2 ulp, exact at 0, +Inf, -Inf; overflow to +Inf, gradual underflow; NaN in, NaN out.
 *
 * x, out and friends are float32 and need no alignment beyond 4 bytes. Strides count elements. No kernel allocates, none fails.
 * Pointers may not overlap unless a comment allows it.
 */
#ifndef COLIBRI_KERNELS_H
#define COLIBRI_KERNELS_H

#include "../utils/matrix.h"

/* Rows of x in one product; rows of w that are best taken together, a multiple of what every table likes. */
enum { MATMUL_ROWS = 128, MATMUL_GROUP = 48 };

/* Floats that m packed rows of n numbers take at most: the numbers, and gaps between the 16 lanes of some rows together. */
static inline int64_t packed_floats(int64_t m, int64_t n)
{
    return m * ((n + 15) / 16 * 16) + (m / 2 + 2) * 16 * 64;
}

/* Floats that a product with rows of n numbers needs meanwhile at most: a few sums for each output of a group of rows of w, and a
 * copy of the group. */
static inline int64_t matmul_scratch(int64_t n)
{
    return 4 * MATMUL_ROWS * MATMUL_GROUP + MATMUL_GROUP * ((n + 15) / 16 * 16) + 16 * 64;
}

typedef struct kernels {
    const char *name; /* "avx512", "avx2", "sse2", "neon", "scalar" */

    /* 1 <= m <= MATMUL_ROWS rows of x as matmul reads them, in whatever order that is: packed holds packed_floats(m, n). A single
     * row need not be packed. */
    void (*pack)(float *packed, const float *x, int64_t x_stride, int64_t m, int64_t n);

    /* out[i][r] = dot(x[i], w[r], w->cols) (+ bias[r], added after the fold) for 0 <= i < m and first <= r < last.
     * x is packed; row i of out begins at out + i * out_stride. bias may be NULL or have data == NULL. Weights are widened
     * exactly on the way. scratch is room for matmul_scratch(w->cols) floats, which a single row does without. The order of
     * outputs is free; each is computed as if alone. */
    void (*matmul)(float *out, int64_t out_stride, const float *packed, int64_t m, const matrix *w, const matrix *bias,
                   int64_t first, int64_t last, float *scratch);

    /* out[i] = w[i] * (x[i] / sqrt(sum16(x^2) / n + eps)): squares enter the lanes by fma, division and square root are IEEE.
     * out may be x. */
    void (*rms_norm)(float *out, const float *x, const matrix *w, int64_t n, float eps);

    /* out[i] = (g / (1 + exp(-g))) * up[i] with g = gate[i]. out may be gate or up. */
    void (*silu_mul)(float *out, const float *gate, const float *up, int64_t n);

    /* out[i] = 1 / (1 + exp(-x[i])). out may be x. */
    void (*sigmoid)(float *out, const float *x, int64_t n);

    void (*exp)(float *out, const float *x, int64_t n); /* out may be x */

    /* p = exp(x - max) / sum; element i adds into lane (first + i) % 16, so that a window of keys sums as the whole row would.
     * A NaN anywhere makes the row NaN (NaN wins in max). n >= 1. out may be x. */
    void (*softmax)(float *out, const float *x, int64_t n, int64_t first);

    /* out[j] = dot(q, keys + j * stride, dim) * scale for 0 <= j < n. */
    void (*scores)(float *out, const float *q, const float *keys, int64_t stride, int64_t n, int64_t dim, float scale);

    /* out[c] = the chain acc = fma(weight[j], rows[j * stride + c], acc), j = 0 .. n-1. At the start acc = +0 or, to `go_on` with
     * an earlier chain, out[c]. n may be 0. */
    void (*weighted_sum)(float *out, const float *weight, const float *rows, int64_t stride, int64_t n, int64_t dim, bool go_on);

    /* acc[i] = fma(factor, x[i], acc[i]). */
    void (*add_scaled)(float *acc, float factor, const float *x, int64_t n);

    void (*add)(float *out, const float *a, const float *b, int64_t n); /* out may be a or b */

    /* x[i] limited to [-limit, limit]; NaN stays NaN. In place. */
    void (*clamp)(float *x, int64_t n, float limit);

    /* One head, in place, pairs (j, j + half): a' = a * cos[j] - b * sin[j], b' = b * cos[j] + a * sin[j]; products are rounded
     * before the sum. */
    void (*rotate_half)(float *x, const float *cos, const float *sin, int64_t half);

    /* Exact widening to float32; a signalling NaN becomes quiet. src may be misaligned. */
    void (*widen)(float *out, const void *src, colibri_dtype dtype, int64_t n);

    /* Of the bit patterns without their signs: the largest one, 0 when n is 0, and the least one that is not 0, minus 1;
     * UINT32_MAX when all are 0. src holds float32 and may be misaligned. */
    void (*magnitudes)(uint32_t *largest, uint32_t *least, const void *src, int64_t n);
} kernels;

/* The table in force. Never NULL: before select_kernels() succeeded it is the best available. */
const kernels *kernels_in_force(void);

/* Reads COLIBRI_ISA (once); UNSUPPORTED lists the available names when it asks for one that is not. Thread-safe. */
colibri_status kernels_select(colibri_message *message);

/* All tables this build and CPU can run, best first; the last one is scalar. For tests and colibri_isa_name(). */
size_t kernels_available(const kernels *const **tables);

/* ---- functions with one portable definition ------------------------------------------------------------------------------- */

/* ids[0..k): the k largest of scores[0..n), descending, ties to the lower index, NaN below every number.
 * 1 <= k <= n <= COLIBRI_MAX_EXPERTS. A branch-free selection network: the time does not depend on the values. scratch holds
 * topk_scratch(n) bytes, 8-byte aligned. */
size_t topk_scratch(int64_t n);
void topk(int32_t *ids, const float *scores, int64_t n, int64_t k, void *scratch);

/* cos and sin of angle = (float)position * inv_freq[j] (the float32 product), each to <= 1 ulp, times factor (float32 product).
 * Own range reduction: the same bits everywhere. */
void rotary_row(float *cos, float *sin, const float *inv_freq, int64_t half, int64_t position, float factor);

/* What bit patterns say of n elements of a floating dtype; src may be misaligned. */
typedef struct sentinel {
    int64_t n_nan, n_signalling;  /* signalling ones count as NaN too */
    int64_t n_inf, n_negative_inf; /* of both signs; negative ones */
    int64_t n_subnormal;
    uint32_t largest;             /* bits of the largest finite magnitude; 0 when there is none */
    uint32_t first_bits;          /* of the first element that is not finite ... */
    int64_t first;                /* ... which stands here; -1 when there is none */
} sentinel;
sentinel sentinel_scan(const void *src, colibri_dtype dtype, int64_t n);

/* The same in short. first_nonfinite is relative to src. */
colibri_census census(const void *src, colibri_dtype dtype, int64_t n);

#endif
