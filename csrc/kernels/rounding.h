/* rounding.h: float32 values as a narrower number format would keep them, and sums that are kept in one.
 *
 * round_to leaves each value as the nearest one of the format, ties to even, widened back to float32 (exactly: every format is a
 * subset). Beyond the largest number the format's own rule holds: Inf, or NaN in float8_e4m3fn, which has no Inf. NaN stays NaN.
 *   flush     a result that is subnormal in the format becomes zero of its sign
 *   saturate  Inf, and what rounds beyond the largest number, becomes the largest of its sign
 * All by integer operations on the bits: no floating-point mode has a say.
 *
 * The sums have the order of kernels.h: 16 lanes and one fold for a dot product, one chain for a weighted sum. Each fused
 * multiply-add (float32, one rounding) and each addition is rounded to the format at once. Plain loops, for study: many times slower
 * than the kernels in force. */
#ifndef COLIBRI_ROUNDING_H
#define COLIBRI_ROUNDING_H

#include "../utils/matrix.h"

static inline bool rounds(colibri_rounding how) /* does it change anything? */
{
    return how.format != COLIBRI_FLOAT32 || how.flush || how.saturate;
}

void round_to(float *x, int64_t n, colibri_rounding how); /* in place */

/* out[r] = dot(x, w[r]) (+ bias[r], rounded as well) for first <= r < last. bias->data may be NULL. */
void rounded_products(float *out, const float *x, const matrix *w, const matrix *bias, int64_t first, int64_t last,
                      colibri_format format);

/* out[j] = dot(q, keys + j * stride, dim) * scale for 0 <= j < n; the product with the scale is float32. */
void rounded_scores(float *out, const float *q, const float *keys, int64_t stride, int64_t n, int64_t dim, float scale,
                    colibri_format format);

/* acc[i] = fma(factor, x[i], acc[i]), rounded: one step of a weighted sum. */
void rounded_add_scaled(float *acc, float factor, const float *x, int64_t n, colibri_format format);

#endif
