/* lanes_kernels.h: the vector kernels, written once over a register of LANES floats and included by each instruction set's file.
 *
 * The includer defines
 *     TABLE, NAME                  the table's symbol and its name
 *     LANES, vec                   floats in one register (a divisor of 16), and its type
 *     TILE_X, TILE_W, TILE_W1      rows of x and of w in a register tile; rows of w in a tile for a single row of x
 *     BATCH_X, PANEL_VECS          with many rows of x: rows of x, and registers of LANES rows of w, in a register tile
 * and these operations (p may have any address; `count` is 1 .. LANES - 1; of a part, lanes from count on read as 0 and are never
 * written):
 *     v_set(f)  v_load(p)  v_load_part(p, count)  v_store(p, v)  v_store_part(p, v, count)  v_load_f16(p)  v_load_bf16(p)
 *     v_add  v_sub  v_mul  v_div   IEEE, one rounding each           v_fma(a, b, c)     a * b + c, one rounding
 *     v_negate(a)                  the sign bit flipped
 *     v_fold(a)                    lane j plus lane j + n/2, down to one float
 *     v_fold4(out, a[4])           out[j] = v_fold(a[j]); may be left out
 *     v_transpose(a[4])            lane 4 * q + j of a[i] changes places with lane 4 * q + i of a[j]
 *     v_store_quad(p, a, q)        the four lanes from 4 * q on
 *     v_at_most(a, b), v_at_least(a, b)   a limited by b; a NaN in a stays
 *     v_max(a, b)                  the larger one; a NaN in either wins
 *     v_first(count, a, b)         lanes below count from a, the others from b
 *     v_quiet(a)                   a signalling NaN made quiet
 *     v_keep(a)                    a stays in its register: else GCC loads it again for every product, and loads set the pace
 *     v_scale(e, shifted)          e * 2^n by the last four lines of exp_f32
 * TILE_X is 2, 4 or 6, BATCH_X at least 2, and PANEL_VECS * LANES divides MATMUL_GROUP. Every output goes through the operations
 * of kernels_scalar.c in the same order. Sixteen lanes are PARTS registers, part p holding lanes p * LANES and on. */
#include <math.h>
#include <string.h>

#include "float32.h"
#include "magnitudes.h"
#include "tables.h"

enum { PARTS = 16 / LANES };

#define INLINE static inline __attribute__((always_inline)) /* dtype and tile sizes must become constants */

/* The sums of a tile stay in registers only if every loop over them vanishes. Clang sees to it by itself (asked to, it does
 * worse). */
#if defined(__clang__)
#define UNROLL
#define UNROLL_BY_4
#define ONCE __attribute__((noinline))
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_BY_4 _Pragma("GCC unroll 4")
#define ONCE __attribute__((noinline, noclone)) /* large code that needs no copy for each caller */
#endif

#ifndef v_fold4
INLINE void v_fold4(float *out, const vec a[4])
{
    for (int j = 0; j < 4; j++)
        out[j] = v_fold(a[j]);
}
#endif

INLINE vec v_load_as(const void *p, colibri_dtype dtype)
{
    return dtype == COLIBRI_F32 ? v_load(p) : dtype == COLIBRI_BF16 ? v_load_bf16(p) : v_load_f16(p);
}

/* Lanes that a step at a distance of `left` elements from the end uses: 1 .. LANES, or no more than 0. */
INLINE int lanes_of(int64_t left)
{
    return left < LANES ? (int)left : LANES;
}

INLINE vec v_get(const float *p, int count)
{
    return count == LANES ? v_load(p) : v_load_part(p, count);
}

INLINE vec v_get_as(const void *p, colibri_dtype dtype, int count)
{
    if (count == LANES)
        return v_load_as(p, dtype);
    if (dtype == COLIBRI_F32)
        return v_load_part(p, count);
    uint16_t halves[LANES] = {0}; /* nothing beyond the row may be read: the mapping can end there */
    memcpy(halves, p, 2 * (size_t)count);
    return v_load_as(halves, dtype);
}

INLINE void v_put(float *p, vec v, int count)
{
    if (count == LANES)
        v_store(p, v);
    else
        v_store_part(p, v, count);
}

INLINE vec fold_parts(vec parts[PARTS])
{
    for (int half = PARTS / 2; half > 0; half /= 2)
        for (int p = 0; p < half; p++)
            parts[p] = v_add(parts[p], parts[p + half]);
    return parts[0];
}

INLINE int64_t size_of(colibri_dtype dtype)
{
    return dtype == COLIBRI_F32 ? 4 : 2;
}

#include "lanes_matmul.h"

/* ---- products with single rows -----------------------------------------------------------------------------------------------
 * */

static void scores(float *out, const float *q, const float *keys, int64_t stride, int64_t n, int64_t dim, float scale)
{
    int64_t j = 0;
    for (; j + TILE_W1 <= n; j += TILE_W1)
        dots(out + j, TILE_W1, q, (const unsigned char *)(keys + j * stride), 4 * stride, COLIBRI_F32, dim);
    for (; j < n; j++)
        dots(out + j, 1, q, (const unsigned char *)(keys + j * stride), 4 * stride, COLIBRI_F32, dim);
    for (j = 0; j < n; j++)
        out[j] *= scale;
}

static void rms_norm(float *out, const float *x, const matrix *w, int64_t n, float eps)
{
    float squares;
    dots(&squares, 1, x, (const unsigned char *)x, 0, COLIBRI_F32, n);
    const vec root = v_set(sqrtf(squares / (float)n + eps));
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        const unsigned char *weights = (const unsigned char *)w->data + i * size_of(w->dtype);
        v_put(out + i, v_mul(v_get_as(weights, w->dtype, count), v_div(v_get(x + i, count), root)), count);
    }
}

/* ---- exp and what is made of it ----------------------------------------------------------------------------------------------
 * */

INLINE vec v_exp(vec x) /* exp_f32, operation by operation */
{
    x = v_at_most(v_at_least(x, v_set(EXP_LOWEST)), v_set(EXP_HIGHEST));
    vec shifted = v_fma(x, v_set(EXP_LOG2E), v_set(EXP_ROUND));
    vec n = v_sub(shifted, v_set(EXP_ROUND));
    vec r = v_fma(n, v_set(-EXP_LN2_LOW), v_fma(n, v_set(-EXP_LN2_HIGH), x));
    vec q = v_fma(v_set(EXP_Q4), r, v_set(EXP_Q3));
    q = v_fma(q, r, v_set(EXP_Q2));
    q = v_fma(q, r, v_set(EXP_Q1));
    q = v_fma(q, r, v_set(EXP_Q0));
    return v_scale(v_add(v_set(1), v_fma(v_mul(r, r), q, r)), shifted);
}

static void exp_all(float *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        v_put(out + i, v_exp(v_get(x + i, count)), count);
    }
}

static void sigmoid(float *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        v_put(out + i, v_div(v_set(1), v_add(v_set(1), v_exp(v_negate(v_get(x + i, count))))), count);
    }
}

static void silu_mul(float *out, const float *gate, const float *up, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        vec g = v_get(gate + i, count);
        vec silu = v_div(g, v_add(v_set(1), v_exp(v_negate(g))));
        v_put(out + i, v_mul(silu, v_get(up + i, count)), count);
    }
}

static float max_of(const float *x, int64_t n)
{
    float lanes[LANES];
    vec most = v_set(x[0]);
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        most = v_first(count, v_max(most, v_get(x + i, count)), most);
    }
    v_store(lanes, most);
    float max = lanes[0];
    for (int j = 1; j < LANES; j++)
        if (lanes[j] > max || lanes[j] != lanes[j])
            max = lanes[j];
    return max;
}

/* Element i goes to lane i % 16: whole groups first, then the rest singly. */
static float sum16(const float *x, int64_t n)
{
    float lanes[16];
    vec parts[PARTS];
    int64_t i = 0;
    for (int p = 0; p < PARTS; p++)
        parts[p] = v_set(0);
    for (; i + 16 <= n; i += 16)
        for (int p = 0; p < PARTS; p++)
            parts[p] = v_add(parts[p], v_load(x + i + p * LANES));
    for (int p = 0; p < PARTS; p++)
        v_store(lanes + p * LANES, parts[p]);
    for (int j = 0; i < n; i++, j++)
        lanes[j] += x[i];
    for (int p = 0; p < PARTS; p++)
        parts[p] = v_load(lanes + p * LANES);
    return v_fold(fold_parts(parts));
}

/* `first` turns the ring of lanes, and the sum does not feel it: the same elements share a lane, and the fold joins lanes that
 * lie 8, then 4, 2 and 1 apart on the ring, wherever it begins. The tests compare with the scalar definition, which uses it. */
static void softmax(float *out, const float *x, int64_t n, int64_t first)
{
    (void)first;
    const vec max = v_set(max_of(x, n));
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        v_put(out + i, v_exp(v_sub(v_get(x + i, count), max)), count);
    }
    const vec sum = v_set(sum16(out, n));
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        v_put(out + i, v_div(v_get(out + i, count), sum), count);
    }
}

/* ---- chains and single operations --------------------------------------------------------------------------------------------
 * */

/* n_parts registers of channels at once; with n_parts == 1 only `count` lanes of it. */
INLINE void columns(float *out, const float *weight, const float *rows, int64_t stride, int64_t n, bool go_on, const int n_parts,
                    int count)
{
    vec sums[8];
    for (int p = 0; p < n_parts; p++)
        sums[p] = go_on ? v_get(out + p * LANES, count) : v_set(0);
    for (int64_t j = 0; j < n; j++) {
        const vec factor = v_set(weight[j]);
        for (int p = 0; p < n_parts; p++)
            sums[p] = v_fma(factor, v_get(rows + j * stride + p * LANES, count), sums[p]);
    }
    for (int p = 0; p < n_parts; p++)
        v_put(out + p * LANES, sums[p], count);
}

static void weighted_sum(float *out, const float *weight, const float *rows, int64_t stride, int64_t n, int64_t dim, bool go_on)
{
    int64_t c = 0;
    for (; c + 8 * LANES <= dim; c += 8 * LANES) /* eight chains hide the latency of one */
        columns(out + c, weight, rows + c, stride, n, go_on, 8, LANES);
    for (; c < dim; c += LANES)
        columns(out + c, weight, rows + c, stride, n, go_on, 1, lanes_of(dim - c));
}

static void add_scaled(float *acc, float factor, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        v_put(acc + i, v_fma(v_set(factor), v_get(x + i, count), v_get(acc + i, count)), count);
    }
}

static void add(float *out, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        v_put(out + i, v_add(v_get(a + i, count), v_get(b + i, count)), count);
    }
}

static void clamp(float *x, int64_t n, float limit)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        v_put(x + i, v_at_least(v_at_most(v_get(x + i, count), v_set(limit)), v_set(-limit)), count);
    }
}

static void rotate_half(float *x, const float *cos, const float *sin, int64_t half)
{
    for (int64_t j = 0; j < half; j += LANES) {
        const int count = lanes_of(half - j);
        vec a = v_get(x + j, count), b = v_get(x + j + half, count), c = v_get(cos + j, count), s = v_get(sin + j, count);
        v_put(x + j, v_sub(v_mul(a, c), v_mul(b, s)), count);
        v_put(x + j + half, v_add(v_mul(b, c), v_mul(a, s)), count);
    }
}

static void widen(float *out, const void *src, colibri_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int count = lanes_of(n - i);
        const unsigned char *from = (const unsigned char *)src + i * size_of(dtype);
        v_put(out + i, v_quiet(v_get_as(from, dtype, count)), count);
    }
}

const kernels TABLE = {
    .name = NAME,
    .pack = pack,
    .matmul = matmul,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .sigmoid = sigmoid,
    .exp = exp_all,
    .softmax = softmax,
    .scores = scores,
    .weighted_sum = weighted_sum,
    .add_scaled = add_scaled,
    .add = add,
    .clamp = clamp,
    .rotate_half = rotate_half,
    .widen = widen,
    .magnitudes = magnitudes,
};
