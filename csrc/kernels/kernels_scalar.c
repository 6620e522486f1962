/* kernels_scalar.c: the definition of every number the kernels produce, in plain C.
 *
 * The order of accumulation stands in kernels.h: 16 lanes, one fused multiply-add an element, one fold. Other tables may compute
 * many outputs at once, but each output through the same operations. Permitted difference: none, except the sign and payload of a
 * NaN.
 *
 * Compiled twice: for any CPU, where float32.h emulates the fused multiply-add, and by kernels_scalar_fma.c for one that has the
 * instruction. */
#include "float32.h"
#include "magnitudes.h"
#include "tables.h"

#ifndef TABLE
#define TABLE kernels_scalar
#endif

/* Lane j plus lane j + n/2, for n = 16, 8, 4, 2. */
static float fold(float lanes[16])
{
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lanes[j] += lanes[j + half];
    return lanes[0];
}

static inline float dot_as(const float *a, const void *b, const colibri_dtype dtype, int64_t n)
{
    float lanes[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++)
            lanes[j] = fma_f32(a[i + j], element_f32(b, dtype, i + j), lanes[j]);
    for (int j = 0; i + j < n; j++)
        lanes[j] = fma_f32(a[i + j], element_f32(b, dtype, i + j), lanes[j]);
    return fold(lanes);
}

static float dot(const float *a, const void *b, colibri_dtype dtype, int64_t n) /* a loop for each dtype, free of the choice */
{
    return dtype == COLIBRI_F32    ? dot_as(a, b, COLIBRI_F32, n)
           : dtype == COLIBRI_BF16 ? dot_as(a, b, COLIBRI_BF16, n)
                                   : dot_as(a, b, COLIBRI_F16, n);
}

static void pack(float *packed, const float *x, int64_t x_stride, int64_t m, int64_t n)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            packed[i * n + j] = x[i * x_stride + j];
}

static void matmul(float *out, int64_t out_stride, const float *packed, int64_t m, const matrix *w, const matrix *bias,
                   int64_t first, int64_t last, float *scratch)
{
    int64_t row_bytes = w->cols * (w->dtype == COLIBRI_F32 ? 4 : 2);
    (void)scratch;
    for (int64_t r = first; r < last; r++) {
        const unsigned char *row = (const unsigned char *)w->data + r * row_bytes;
        for (int64_t i = 0; i < m; i++) {
            float y = dot(packed + i * w->cols, row, w->dtype, w->cols);
            if (bias != NULL && bias->data != NULL)
                y += element_f32(bias->data, bias->dtype, r);
            out[i * out_stride + r] = y;
        }
    }
}

static void rms_norm(float *out, const float *x, const matrix *w, int64_t n, float eps)
{
    float root = sqrtf(dot(x, x, COLIBRI_F32, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        out[i] = element_f32(w->data, w->dtype, i) * (x[i] / root);
}

static void silu_mul(float *out, const float *gate, const float *up, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = silu_f32(gate[i]) * up[i];
}

static void sigmoid(float *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = sigmoid_f32(x[i]);
}

static void exp_all(float *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = exp_f32(x[i]);
}

static void softmax(float *out, const float *x, int64_t n, int64_t first)
{
    float max = x[0];
    for (int64_t i = 1; i < n; i++)
        if (x[i] > max || x[i] != x[i]) /* once NaN, max stays NaN: nothing is greater */
            max = x[i];
    float lanes[16] = {0};
    for (int64_t i = 0; i < n; i++) {
        out[i] = exp_f32(x[i] - max);
        lanes[(first + i) % 16] += out[i];
    }
    float sum = fold(lanes);
    for (int64_t i = 0; i < n; i++)
        out[i] = out[i] / sum;
}

static void scores(float *out, const float *q, const float *keys, int64_t stride, int64_t n, int64_t dim, float scale)
{
    for (int64_t j = 0; j < n; j++)
        out[j] = dot(q, keys + j * stride, COLIBRI_F32, dim) * scale;
}

static void weighted_sum(float *out, const float *weight, const float *rows, int64_t stride, int64_t n, int64_t dim,
                         bool go_on)
{
    for (int64_t c = 0; c < dim; c++) {
        float sum = go_on ? out[c] : 0;
        for (int64_t j = 0; j < n; j++)
            sum = fma_f32(weight[j], rows[j * stride + c], sum);
        out[c] = sum;
    }
}

static void add_scaled(float *acc, float factor, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        acc[i] = fma_f32(factor, x[i], acc[i]);
}

static void add(float *out, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = a[i] + b[i];
}

static void clamp(float *x, int64_t n, float limit)
{
    for (int64_t i = 0; i < n; i++) { /* a NaN compares false twice and stays */
        x[i] = x[i] > limit ? limit : x[i];
        x[i] = x[i] < -limit ? -limit : x[i];
    }
}

static void rotate_half(float *x, const float *cos, const float *sin, int64_t half)
{
    for (int64_t j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
    }
}

static void widen(float *out, const void *src, colibri_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = element_f32(src, dtype, i);
}

const kernels TABLE = {
    .name = "scalar",
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
