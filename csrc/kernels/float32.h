/* float32.h: the arithmetic of single numbers, as the definition has it: widening, fused multiply-add, exp.
 *
 * Every function is pure, needs no libm and gives the same bits on every machine with IEEE arithmetic. The vector kernels repeat
 * exp_f32 operation by operation; the tests compare them on all 2^32 inputs. */
#ifndef COLIBRI_FLOAT32_H
#define COLIBRI_FLOAT32_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../utils/half.h"
#include "colibri.h"

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "build without -ffast-math and -ffinite-math-only: they fold NaN checks away and change the numbers"
#endif
#if FLT_EVAL_METHOD != 0
#error "build with float and double arithmetic in their own precision (on 32-bit x86: -msse2 -mfpmath=sse)"
#endif

/* Element i of an array of a floating dtype at any byte address. */
static inline float element_f32(const void *array, colibri_dtype dtype, int64_t i)
{
    const unsigned char *bytes = array;
    uint32_t word;
    uint16_t half;
    if (dtype == COLIBRI_F32) {
        memcpy(&word, bytes + 4 * i, sizeof word);
        return float_from_bits(quiet_nan_bits(word));
    }
    memcpy(&half, bytes + 2 * i, sizeof half);
    return dtype == COLIBRI_BF16 ? bf16_to_float(half) : f16_to_float(half);
}

/* a * b + c with one rounding, in double arithmetic: for compilers that may not assume an FMA instruction.
 *
 * The product of two 24-bit mantissas is exact in 53 bits. TwoSum gives the sum s and its exact error. Rounding s to odd (if the
 * sum is inexact and the last bit of s is even, step to the neighbour on the side of the error) leaves a value that rounds to
 * float32 as the exact sum would, subnormal results included, since double keeps more than two further bits. */
static inline float fma_f32_portable(float a, float b, float c)
{
    double product = (double)a * (double)b, s = product + (double)c;
    double shadow = s - product, error = (product - (s - shadow)) + ((double)c - shadow);
    if (error != 0 && s - s == 0) { /* s - s != 0: Inf or NaN, nothing to round */
        uint64_t bits;
        memcpy(&bits, &s, sizeof bits);
        if ((bits & 1) == 0)
            bits += (error > 0) == (s > 0) ? 1 : UINT64_MAX;
        memcpy(&s, &bits, sizeof s);
    }
    return (float)s;
}

static inline float fma_f32(float a, float b, float c)
{
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return fma_f32_portable(a, b, c);
#endif
}

/* exp(x) = 2^n * e^r with n = round(x * log2 e), |r| <= ln2 / 2 (1 + tiny).
 *
 * e^r = 1 + (r + r^2 q(r)); q interpolates (e^r - 1 - r) / r^2 at the 5 Chebyshev nodes of [-ln2/2, ln2/2], relative error of e^r
 * < 1e-8:
 *     h = ln2 / 2;  nodes = [h * cos(pi * (2 i + 1) / 10) for i in range(5)]
 *     q = solve([[x**j for j in range(5)] for x in nodes], [(exp(x) - 1 - x) / x**2 for x in nodes])  (60 digits, to float32)
 * ln2 = EXP_LN2_HIGH + EXP_LN2_LOW; the high part 355/512 has 9 bits, so n * EXP_LN2_HIGH is exact. Beyond the limits the result
 * is 0 or +Inf anyway: e^-104 < 2^-150, half the smallest subnormal, and e^89 > 2^128. */
#define EXP_LOWEST -104.0f
#define EXP_HIGHEST 89.0f
#define EXP_LOG2E 1.44269504f
#define EXP_ROUND 12582912.0f /* 1.5 * 2^23: adding it leaves the rounded integer in the low bits */
#define EXP_LN2_HIGH 0.693359375f
#define EXP_LN2_LOW -0x1.bd0106p-13f
#define EXP_Q0 0.5f
#define EXP_Q1 0x1.5554dep-3f
#define EXP_Q2 0x1.55551ap-5f
#define EXP_Q3 0x1.120b62p-7f
#define EXP_Q4 0x1.6d10fcp-10f

static inline float exp_f32(float x)
{
    x = x < EXP_LOWEST ? EXP_LOWEST : x; /* NaN passes both */
    x = x > EXP_HIGHEST ? EXP_HIGHEST : x;
    float shifted = fma_f32(x, EXP_LOG2E, EXP_ROUND);
    float n = shifted - EXP_ROUND;
    float r = fma_f32(n, -EXP_LN2_LOW, fma_f32(n, -EXP_LN2_HIGH, x));
    float q = fma_f32(fma_f32(fma_f32(fma_f32(EXP_Q4, r, EXP_Q3), r, EXP_Q2), r, EXP_Q1), r, EXP_Q0);
    float e = 1.0f + fma_f32(r * r, q, r);
    /* 2^n in two factors, so that n = 128 and n = -150 pass, and only the last product rounds. Of a NaN the factors are
     * arbitrary. */
    uint32_t power = float_bits(shifted) - float_bits(EXP_ROUND);
    uint32_t first = power >> 1 | (power & 0x80000000), second = power - first; /* first = floor(n / 2) */
    return e * float_from_bits((first + 127) << 23) * float_from_bits((second + 127) << 23);
}

static inline float sigmoid_f32(float x)
{
    return 1.0f / (1.0f + exp_f32(-x));
}

static inline float silu_f32(float x)
{
    return x / (1.0f + exp_f32(-x));
}

#endif
