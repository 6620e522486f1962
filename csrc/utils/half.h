/* half.h: f16 and bf16 to float32 by bits. The one rule of widening: every value is exact, subnormals included, and a signalling
 * NaN becomes quiet (its payload kept, bit 22 set), as the hardware converters do. Narrowing is not needed: weights are never
 * written. */
#ifndef COLIBRI_HALF_H
#define COLIBRI_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t quiet_nan_bits(uint32_t bits)
{
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x00400000u : bits;
}

static inline float bf16_to_float(uint16_t half)
{
    return float_from_bits(quiet_nan_bits((uint32_t)half << 16));
}

static inline float f16_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = half >> 10 & 0x1Fu, fraction = half & 0x3FFu;
    if (exponent == 0) {                                 /* fraction * 2^-24: a normal float32, so product and sign are exact */
        float magnitude = (float)fraction * 0x1p-24f;
        return float_from_bits(float_bits(magnitude) | sign);
    }
    if (exponent == 31)
        return float_from_bits(quiet_nan_bits(sign | 0x7F800000u | fraction << 13));
    return float_from_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13);
}

#endif
