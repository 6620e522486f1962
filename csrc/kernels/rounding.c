#include "rounding.h"

#include "float32.h"

/* A binary format with exponents biased as IEEE does it: 2^(exponent_bits - 1) - 1. */
typedef struct number_format {
    int exponent_bits, fraction_bits;
    bool has_inf;
    float largest;
} number_format;

static const number_format formats[] = {
    [COLIBRI_FLOAT32] = {8, 23, true, FLT_MAX},
    [COLIBRI_FLOAT16] = {5, 10, true, 65504},
    [COLIBRI_BFLOAT16] = {8, 7, true, 0x1.fep127f},
    [COLIBRI_FLOAT8_E4M3FN] = {4, 3, false, 448}, /* the pattern above 448 is NaN */
    [COLIBRI_FLOAT8_E5M2] = {5, 2, true, 57344},
};

/* bits >> shift, to the nearest, ties to even. 1 <= shift <= 31 */
static uint32_t shift_to_even(uint32_t bits, int shift)
{
    uint32_t half = (uint32_t)1 << (shift - 1);
    return (bits + half - 1 + (bits >> shift & 1)) >> shift;
}

static inline float rounded(float x, const number_format *f, bool flush, bool saturate)
{
    uint32_t sign = float_bits(x) & 0x80000000u, size = float_bits(x) ^ sign, infinite = 0x7F800000u;
    if (size > infinite)
        return float_from_bits(quiet_nan_bits(sign | size));

    /* The exponent of the smallest normal number, as float32 stores it: 127 + (2 - 2^(exponent_bits - 1)). */
    int lowest = 129 - (1 << (f->exponent_bits - 1)), dropped = 23 - f->fraction_bits, exponent = (int)(size >> 23);
    if (exponent < lowest && lowest > 1) { /* a multiple of the smallest subnormal number; with 8 exponent bits, float32's own */
        int shift = dropped + lowest - exponent;
        uint32_t n = shift > 25 ? 0 : shift_to_even((size & 0x007FFFFFu) | 0x00800000u, shift); /* at 25 already less than half */
        float smallest = float_from_bits((uint32_t)(lowest - f->fraction_bits) << 23);
        size = float_bits((float)n * smallest); /* exact, and normal */
    } else if (dropped > 0) {
        size = shift_to_even(size, dropped) << dropped; /* a carry goes into the exponent, as it should; Inf stays */
    }

    if (size > float_bits(f->largest))
        size = saturate ? float_bits(f->largest) : f->has_inf ? infinite : 0x7FC00000u;
    if (flush && size < (uint32_t)lowest << 23)
        size = 0;
    return float_from_bits(sign | size);
}

void round_to(float *x, int64_t n, colibri_rounding how)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = rounded(x[i], &formats[how.format], how.flush, how.saturate);
}

/* a * b + c in float32, as the format keeps it. */
static float rounded_fma(float a, float b, float c, const number_format *f)
{
    return rounded(fma_f32(a, b, c), f, false, false);
}

static float rounded_dot(const float *a, const void *b, colibri_dtype dtype, int64_t n, const number_format *f)
{
    float lanes[16] = {0};
    for (int64_t i = 0; i < n; i++)
        lanes[i % 16] = rounded_fma(a[i], element_f32(b, dtype, i), lanes[i % 16], f);
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lanes[j] = rounded(lanes[j] + lanes[j + half], f, false, false);
    return lanes[0];
}

void rounded_products(float *out, const float *x, const matrix *w, const matrix *bias, int64_t first, int64_t last,
                      colibri_format format)
{
    const number_format *f = &formats[format];
    int64_t row_bytes = w->cols * (int64_t)colibri_dtype_size(w->dtype);
    for (int64_t r = first; r < last; r++) {
        out[r] = rounded_dot(x, (const unsigned char *)w->data + r * row_bytes, w->dtype, w->cols, f);
        if (bias->data != NULL)
            out[r] = rounded(out[r] + element_f32(bias->data, bias->dtype, r), f, false, false);
    }
}

void rounded_scores(float *out, const float *q, const float *keys, int64_t stride, int64_t n, int64_t dim, float scale,
                    colibri_format format)
{
    for (int64_t j = 0; j < n; j++)
        out[j] = rounded_dot(q, keys + j * stride, COLIBRI_F32, dim, &formats[format]) * scale;
}

void rounded_add_scaled(float *acc, float factor, const float *x, int64_t n, colibri_format format)
{
    for (int64_t i = 0; i < n; i++)
        acc[i] = rounded_fma(factor, x[i], acc[i], &formats[format]);
}
