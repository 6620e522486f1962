/* census.c: NaN, Inf and subnormals counted by bit pattern, so that no compiler flag can fold the questions away. */
#include "float32.h"
#include "kernels.h"

enum { CHUNK = 4096 }; /* elements counted before asking whether the first non-finite one lies among them */

typedef struct layout {
    uint32_t exponent, mantissa; /* masks */
} layout;

static layout layout_of(colibri_dtype dtype)
{
    switch (dtype) {
    case COLIBRI_F16:
        return (layout){0x7c00, 0x03ff};
    case COLIBRI_BF16:
        return (layout){0x7f80, 0x007f};
    default:
        return (layout){0x7f800000, 0x007fffff};
    }
}

static uint32_t load_bits(const unsigned char *bytes, int size, int64_t i)
{
    if (size == 4) {
        uint32_t word;
        memcpy(&word, bytes + 4 * i, sizeof word);
        return word;
    }
    uint16_t half;
    memcpy(&half, bytes + 2 * i, sizeof half);
    return half;
}

static inline void count(colibri_census *total, const unsigned char *bytes, int size, layout masks, int64_t first, int64_t last)
{
    int32_t n_special = 0, n_nan = 0, n_subnormal = 0; /* at most CHUNK */
    for (int64_t i = first; i < last; i++) {
        uint32_t bits = load_bits(bytes, size, i), exponent = bits & masks.exponent, mantissa = bits & masks.mantissa;
        n_special += exponent == masks.exponent;
        n_nan += (exponent == masks.exponent) & (mantissa != 0);
        n_subnormal += (exponent == 0) & (mantissa != 0);
    }
    if (n_special > 0 && total->first_nonfinite < 0) {
        int64_t i = first;
        while ((load_bits(bytes, size, i) & masks.exponent) != masks.exponent)
            i++;
        total->first_nonfinite = i;
    }
    total->n_nan += n_nan;
    total->n_inf += n_special - n_nan;
    total->n_subnormal += n_subnormal;
}

colibri_census census(const void *src, colibri_dtype dtype, int64_t n)
{
    colibri_census total = {0, 0, 0, -1};
    layout masks = layout_of(dtype);
    for (int64_t first = 0; first < n; first += CHUNK) {
        int64_t last = n - first < CHUNK ? n : first + CHUNK;
        if (dtype == COLIBRI_F32) /* the size is a constant in each call, so each loop is compiled for its own */
            count(&total, src, 4, masks, first, last);
        else
            count(&total, src, 2, masks, first, last);
    }
    return total;
}
