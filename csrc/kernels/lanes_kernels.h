/* lanes_kernels.h: the vector kernels, written once over a register of LANES floats and included by each instruction set's file.
 *
 * The includer defines
 *     TABLE, NAME                  the table's symbol and its name
 *     LANES, vec                   floats in one register (a divisor of 16), and its type
 *     TILE_X, TILE_W, TILE_W1      rows of x and of w in a register tile; rows of w in a tile for a single row of x
 * and these operations (p may have any address; `count` is 1 .. LANES - 1; of a part, lanes from count on read as 0 and are never
 * written):
 *     v_set(f)  v_load(p)  v_load_part(p, count)  v_store(p, v)  v_store_part(p, v, count)  v_load_f16(p)  v_load_bf16(p)
 *     v_add  v_sub  v_mul  v_div   IEEE, one rounding each           v_fma(a, b, c)     a * b + c, one rounding
 *     v_negate(a)                  the sign bit flipped
 *     v_fold(a)                    lane j plus lane j + n/2, down to one float
 *     v_at_most(a, b), v_at_least(a, b)   a limited by b; a NaN in a stays
 *     v_max(a, b)                  the larger one; a NaN in either wins
 *     v_first(count, a, b)         lanes below count from a, the others from b
 *     v_quiet(a)                   a signalling NaN made quiet
 *     v_keep(a)                    a stays in its register: else GCC loads it again for every product, and loads set the pace
 *     v_scale(e, shifted)          e * 2^n by the last four lines of exp_f32
 * 2 <= TILE_X <= 4. Every output goes through the operations of kernels_scalar.c in the same order. Sixteen lanes are PARTS
 * registers, part p holding lanes p * LANES and on. */
#include <math.h>
#include <string.h>

#include "float32.h"
#include "tables.h"

enum { PARTS = 16 / LANES, TILE_MOST = TILE_W > TILE_W1 ? TILE_W : TILE_W1 };

#define INLINE static inline __attribute__((always_inline)) /* dtype and tile sizes must become constants */

/* The sums of a tile stay in registers only if every loop over them vanishes. Clang sees to it by itself (asked to, it does
 * worse). */
#if defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE vec v_load_as(const void *p, colibri_dtype dtype)
{
    return dtype == COLIBRI_F32 ? v_load(p) : dtype == COLIBRI_BF16 ? v_load_bf16(p) : v_load_f16(p);
}

/* Lanes that a step at a distance of `left` elements from the end uses: 1 .. LANES. */
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

INLINE float fold16(vec parts[PARTS])
{
    for (int half = PARTS / 2; half > 0; half /= 2)
        for (int p = 0; p < half; p++)
            parts[p] = v_add(parts[p], parts[p + half]);
    return v_fold(parts[0]);
}

/* ---- dot products ------------------------------------------------------------------------------------------------------------
 * */

INLINE int64_t size_of(colibri_dtype dtype)
{
    return dtype == COLIBRI_F32 ? 4 : 2;
}

/* out[t * out_stride + r] = dot(row t of x, row r of w) (+ bias[r]) for t < n_x, r < n_w: one register tile, every sum held in
 * registers over the whole row. Rows of w lie w_bytes apart. */
INLINE void tile(float *out, int64_t out_stride, const int n_x, const int n_w, const float *x, int64_t x_stride,
                 const unsigned char *w, int64_t w_bytes, const colibri_dtype dtype, int64_t n, const float *bias)
{
    vec sums[4][TILE_MOST][PARTS], row[TILE_MOST];
    int64_t k = 0;
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int r = 0; r < n_w; r++)
            UNROLL for (int p = 0; p < PARTS; p++)
                sums[t][r][p] = v_set(0);
    for (; k + 16 <= n; k += 16)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const int64_t at = k + p * LANES;
            UNROLL for (int r = 0; r < n_w; r++) {
                row[r] = v_load_as(w + r * w_bytes + at * size_of(dtype), dtype);
                if (n_x > 1)
                    v_keep(row[r]);
            }
            UNROLL for (int t = 0; t < n_x; t++) {
                vec column = v_load(x + t * x_stride + at);
                if (n_w > 1)
                    v_keep(column);
                UNROLL for (int r = 0; r < n_w; r++)
                    sums[t][r][p] = v_fma(column, row[r], sums[t][r][p]);
            }
        }
    UNROLL for (int p = 0; p < PARTS; p++) { /* the last, incomplete group of 16: lanes beyond the end keep their sums */
        const int64_t at = k + p * LANES;
        const int count = lanes_of(n - at);
        if (count <= 0)
            break;
        UNROLL for (int r = 0; r < n_w; r++)
            row[r] = v_get_as(w + r * w_bytes + at * size_of(dtype), dtype, count);
        UNROLL for (int t = 0; t < n_x; t++) {
            const vec column = v_get(x + t * x_stride + at, count);
            UNROLL for (int r = 0; r < n_w; r++)
                sums[t][r][p] = v_first(count, v_fma(column, row[r], sums[t][r][p]), sums[t][r][p]);
        }
    }
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int r = 0; r < n_w; r++) {
            const float dot = fold16(sums[t][r]);
            out[t * out_stride + r] = bias == NULL ? dot : dot + bias[r];
        }
}

INLINE void tile_any(float *out, int64_t out_stride, int n_x, const int n_w, const float *x, int64_t x_stride,
                     const unsigned char *w, int64_t w_bytes, const colibri_dtype dtype, int64_t n, const float *bias)
{
    if (TILE_X >= 4 && n_x == 4)
        tile(out, out_stride, 4, n_w, x, x_stride, w, w_bytes, dtype, n, bias);
    else if (TILE_X >= 3 && n_x == 3)
        tile(out, out_stride, 3, n_w, x, x_stride, w, w_bytes, dtype, n, bias);
    else if (n_x == 2)
        tile(out, out_stride, 2, n_w, x, x_stride, w, w_bytes, dtype, n, bias);
    else
        tile(out, out_stride, 1, n_w, x, x_stride, w, w_bytes, dtype, n, bias);
}

INLINE const float *bias_from(const float *bias, int r)
{
    return bias == NULL ? NULL : bias + r;
}

/* A panel is a few rows of w that stay in the nearest caches while all rows of x pass over them; meanwhile the next one is on its
 * way from memory: whole, when there is enough to compute to hide that; else memory sets the pace anyway, and the hardware's own
 * prefetch needs only to be shown where rows begin. There is no blocking over n: it would spill 16 partial sums an output. */
enum { PANEL_BYTES = 24 * 1024, PANEL_MOST = 64, FEW = 16, BEGINNING = 256 };

INLINE void panel(float *out, int64_t out_stride, const float *x, int64_t x_stride, int64_t m, const unsigned char *w,
                  int n_rows, int n_next, int64_t w_bytes, const colibri_dtype dtype, int64_t n, const float *bias)
{
    const int64_t shown = m < FEW && w_bytes > BEGINNING ? BEGINNING : w_bytes;
    for (int64_t i = 0; i < m; i += TILE_X) {
        const int n_x = m - i < TILE_X ? (int)(m - i) : TILE_X;
        for (int64_t j = n_rows + n_next * i / m; j < n_rows + n_next * (i + n_x) / m; j++)
            for (int64_t at = 0; at < shown; at += 64)
                __builtin_prefetch(w + j * w_bytes + at, 0, 2);
        const float *rows = x + i * x_stride;
        float *y = out + i * out_stride;
        int r = 0;
        if (m == 1)
            for (; r + TILE_W1 <= n_rows; r += TILE_W1)
                tile(y + r, 0, 1, TILE_W1, rows, 0, w + r * w_bytes, w_bytes, dtype, n, bias_from(bias, r));
        else
            for (; r + TILE_W <= n_rows; r += TILE_W)
                tile_any(y + r, out_stride, n_x, TILE_W, rows, x_stride, w + r * w_bytes, w_bytes, dtype, n, bias_from(bias, r));
        for (; r < n_rows; r++)
            tile_any(y + r, out_stride, n_x, 1, rows, x_stride, w + r * w_bytes, w_bytes, dtype, n, bias_from(bias, r));
    }
}

INLINE void matmul_as(float *out, int64_t out_stride, const float *x, int64_t x_stride, int64_t m, const matrix *w,
                      const matrix *bias, int64_t first, int64_t last, const colibri_dtype dtype)
{
    const int64_t w_bytes = w->cols * size_of(dtype), step = m == 1 ? TILE_W1 : TILE_W;
    int64_t n_rows = PANEL_BYTES / (w_bytes + 1) / step * step;
    n_rows = n_rows < step ? step : n_rows > PANEL_MOST ? PANEL_MOST / step * step : n_rows;
    float added[PANEL_MOST];
    for (int64_t r = first; r < last; r += n_rows) {
        const int64_t left = last - r;
        const int now = (int)(left < n_rows ? left : n_rows), next = (int)(left - now < n_rows ? left - now : n_rows);
        const bool biased = bias != NULL && bias->data != NULL;
        for (int j = 0; biased && j < now; j++)
            added[j] = element_f32(bias->data, bias->dtype, r + j);
        const unsigned char *rows = (const unsigned char *)w->data + r * w_bytes;
        panel(out + r, out_stride, x, x_stride, m, rows, now, next, w_bytes, dtype, w->cols, biased ? added : NULL);
    }
}

static void matmul(float *out, int64_t out_stride, const float *x, int64_t x_stride, int64_t m, const matrix *w,
                   const matrix *bias, int64_t first, int64_t last)
{
    if (w->dtype == COLIBRI_F32)
        matmul_as(out, out_stride, x, x_stride, m, w, bias, first, last, COLIBRI_F32);
    else if (w->dtype == COLIBRI_BF16)
        matmul_as(out, out_stride, x, x_stride, m, w, bias, first, last, COLIBRI_BF16);
    else
        matmul_as(out, out_stride, x, x_stride, m, w, bias, first, last, COLIBRI_F16);
}

static void scores(float *out, const float *q, const float *keys, int64_t stride, int64_t n, int64_t dim, float scale)
{
    int64_t j = 0;
    for (; j + TILE_W1 <= n; j += TILE_W1)
        tile(out + j, 0, 1, TILE_W1, q, 0, (const unsigned char *)(keys + j * stride), 4 * stride, COLIBRI_F32, dim, NULL);
    for (; j < n; j++)
        tile(out + j, 0, 1, 1, q, 0, (const unsigned char *)(keys + j * stride), 4 * stride, COLIBRI_F32, dim, NULL);
    for (j = 0; j < n; j++)
        out[j] *= scale;
}

static void rms_norm(float *out, const float *x, const matrix *w, int64_t n, float eps)
{
    float squares;
    tile(&squares, 0, 1, 1, x, 0, (const unsigned char *)x, 0, COLIBRI_F32, n, NULL);
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
    return fold16(parts);
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
INLINE void columns(float *out, const float *weight, const float *rows, int64_t stride, int64_t n, const int n_parts, int count)
{
    vec sums[8];
    for (int p = 0; p < n_parts; p++)
        sums[p] = v_set(0);
    for (int64_t j = 0; j < n; j++) {
        const vec factor = v_set(weight[j]);
        for (int p = 0; p < n_parts; p++)
            sums[p] = v_fma(factor, v_get(rows + j * stride + p * LANES, count), sums[p]);
    }
    for (int p = 0; p < n_parts; p++)
        v_put(out + p * LANES, sums[p], count);
}

static void weighted_sum(float *out, const float *weight, const float *rows, int64_t stride, int64_t n, int64_t dim)
{
    int64_t c = 0;
    for (; c + 8 * LANES <= dim; c += 8 * LANES) /* eight chains hide the latency of one */
        columns(out + c, weight, rows + c, stride, n, 8, LANES);
    for (; c < dim; c += LANES)
        columns(out + c, weight, rows + c, stride, n, 1, lanes_of(dim - c));
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
};
