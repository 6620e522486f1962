/* rotary.c: cos and sin of a rotary angle, right for every float32.
 *
 * The reference rounds the angle to float32; cos and sin of that very number are wanted. So |angle| = m * 2^e with a 24-bit
 * integer m is exact, and the reduction is done in integers: of m * 2^e * 2/pi only the value modulo 4 matters (the quadrant and
 * the fraction in it), so a window of 96 bits of 2/pi, placed by e, suffices at any size. The product's truncation costs < 2^-60
 * of a quadrant. The float32 closest to a multiple of pi/2, 16367173 * 2^72, is 2^-29.8 of a quadrant away from it, so the
 * reduced angle is right to 2^-30 of itself and the result to 0.52 ulp. */
#include "float32.h"
#include "kernels.h"

/* 32 zero bits, then the first 224 bits of 2/pi after the binary point: "%056x" % floor(2 / pi * 2**224). The largest float32
 * needs 198. */
static const uint32_t two_over_pi[8] = {0,          0xa2f9836e, 0x4e441529, 0xfc2757d1,
                                        0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab};

/* 32 bits of the table from bit `position` on. */
static uint32_t table_bits(int position)
{
    int word = position / 32, shift = position % 32;
    uint64_t pair = (uint64_t)two_over_pi[word] << 32 | (word < 7 ? two_over_pi[word + 1] : 0);
    return (uint32_t)(pair >> (32 - shift));
}

/* magnitude = quadrant * pi/2 + result, |result| <= pi/4 (a hair more at the ends). pi/4 <= magnitude < Inf. */
static double reduce(float magnitude, int *quadrant)
{
    uint32_t bits = float_bits(magnitude);
    uint64_t m = (bits & 0x007fffff) | 0x00800000;
    int e = (int)(bits >> 23) - 150;
    /* turns = m * 2^e * 2/pi modulo 4, scaled by 2^62. Bit i of 2/pi (weight 2^-i) has weight 2^(e + 62 - i) there, so the window
     * begins at i = e - 1 with weight 2^63 and everything above it is a multiple of 4. Bit i lies at position 32 + i - 1 of the
     * table. */
    int start = e + 30;
    uint64_t turns = (m * table_bits(start) << 32) + m * table_bits(start + 32) + (m * table_bits(start + 64) >> 32);
    uint64_t nearest = (turns + ((uint64_t)1 << 61)) >> 62;
    *quadrant = (int)(nearest & 3);
    turns -= nearest << 62; /* now a signed fraction within +-2^61 */
    double fraction = turns >> 63 ? -(double)(0 - turns) : (double)turns;
    return fraction * 0x1.921fb54442d18p-62; /* pi/2 * 2^-62 */
}

/* Taylor series about 0, |r| <= pi/4: the first term left out is below 3e-14 (sin) and 4e-13 (cos) of the result. */
static double sin_series(double r)
{
    double z = r * r;
    double high = 1.0 / 362880 + z * (-1.0 / 39916800 + z * (1.0 / 6227020800)); /* 9!, 11!, 13! */
    return r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * high)));
}

static double cos_series(double r)
{
    double z = r * r;
    double high = 1.0 / 40320 + z * (-1.0 / 3628800 + z * (1.0 / 479001600)); /* 8!, 10!, 12! */
    return 1.0 + z * (-1.0 / 2 + z * (1.0 / 24 + z * (-1.0 / 720 + z * high)));
}

static void cos_sin(float angle, float *cos, float *sin)
{
    float magnitude = angle < 0 ? -angle : angle;
    double r = magnitude;
    int quadrant = 0;
    if (magnitude - magnitude != 0) { /* Inf or NaN */
        *cos = *sin = angle - angle;
        return;
    }
    if (magnitude > 0.78539816f)
        r = reduce(magnitude, &quadrant);
    double c = cos_series(r), s = sin_series(r);
    double quadrant_cos[4] = {c, -s, -c, s}, quadrant_sin[4] = {s, c, -s, -c};
    *cos = (float)quadrant_cos[quadrant];
    *sin = angle < 0 ? -(float)quadrant_sin[quadrant] : (float)quadrant_sin[quadrant];
}

void rotary_row(float *cos, float *sin, const float *inv_freq, int64_t half, int64_t position, float factor)
{
    for (int64_t j = 0; j < half; j++) {
        cos_sin((float)position * inv_freq[j], &cos[j], &sin[j]);
        cos[j] *= factor;
        sin[j] *= factor;
    }
}
