/* sentinel.c: NaN, Inf and subnormals found by bit pattern, so that no compiler flag can fold the questions away.
 *
 * Without its sign a bit pattern is an integer that grows with the magnitude: the largest one of a chunk says whether anything is
 * not finite, and then only the rest is asked. All of it is 32-bit integer arithmetic, which compilers make vectors of. */
#include "float32.h"
#include "kernels.h"

enum { CHUNK = 4096 }; /* elements looked at before asking what is among them: a first cache holds them for a second look */

typedef struct layout {
    uint32_t magnitude, exponent, quiet; /* masks: all but the sign; the exponent, which is also Inf; what makes a NaN quiet */
    uint32_t normal;                     /* the least pattern that is not subnormal */
} layout;

static layout layout_of(colibri_dtype dtype)
{
    switch (dtype) {
    case COLIBRI_F16: return (layout){0x7fff, 0x7c00, 0x0200, 0x0400};
    case COLIBRI_BF16: return (layout){0x7fff, 0x7f80, 0x0040, 0x0080};
    default: return (layout){0x7fffffff, 0x7f800000, 0x00400000, 0x00800000};
    }
}

static inline uint32_t load_bits(const unsigned char *bytes, int size, int64_t i)
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

/* The same for a chunk in which something is not finite. Counts are at most CHUNK. */
static inline void look_again(sentinel *total, const unsigned char *bytes, int size, layout mask, int64_t first, int64_t last)
{
    int32_t n_special = 0, n_nan = 0, n_quiet = 0, n_negative_inf = 0, largest = 0;
    int32_t inf = (int32_t)mask.exponent;
    for (int64_t i = first; i < last; i++) {
        uint32_t bits = load_bits(bytes, size, i);
        int32_t magnitude = (int32_t)(bits & mask.magnitude), finite = magnitude < inf ? magnitude : 0;
        n_special += magnitude >= inf;
        n_nan += magnitude > inf;
        n_quiet += (magnitude > inf) & ((bits & mask.quiet) != 0);
        n_negative_inf += (magnitude == inf) & ((bits & ~mask.magnitude) != 0);
        largest = finite > largest ? finite : largest;
    }
    if (total->first < 0) {
        int64_t i = first;
        while ((load_bits(bytes, size, i) & mask.exponent) != mask.exponent)
            i++;
        total->first = i;
        total->first_bits = load_bits(bytes, size, i);
    }
    total->n_nan += n_nan;
    total->n_signalling += n_nan - n_quiet;
    total->n_inf += n_special - n_nan;
    total->n_negative_inf += n_negative_inf;
    if ((uint32_t)largest > total->largest)
        total->largest = (uint32_t)largest;
}

static inline void look(sentinel *total, const unsigned char *bytes, int size, layout mask, int64_t first, int64_t last)
{
    int32_t n_below = 0, n_zero = 0, largest = 0, normal = (int32_t)mask.normal;
    for (int64_t i = first; i < last; i++) {
        int32_t magnitude = (int32_t)(load_bits(bytes, size, i) & mask.magnitude);
        n_below += magnitude < normal;
        n_zero += magnitude == 0;
        largest = magnitude > largest ? magnitude : largest;
    }
    total->n_subnormal += n_below - n_zero;
    if ((uint32_t)largest >= mask.exponent)
        look_again(total, bytes, size, mask, first, last);
    else if ((uint32_t)largest > total->largest)
        total->largest = (uint32_t)largest;
}

/* Values that sessions compute: nearly always all are finite and none is subnormal, which two bounds tell. */
static void look_f32(sentinel *total, const unsigned char *bytes, layout mask, int64_t first, int64_t last)
{
    uint32_t largest, least;
    kernels_in_force()->magnitudes(&largest, &least, bytes + 4 * first, last - first);
    if (largest >= mask.exponent || least < mask.normal - 1)
        look(total, bytes, 4, mask, first, last);
    else if (largest > total->largest)
        total->largest = largest;
}

sentinel sentinel_scan(const void *src, colibri_dtype dtype, int64_t n)
{
    sentinel total = {.first = -1};
    layout mask = layout_of(dtype);
    for (int64_t first = 0; first < n; first += CHUNK) {
        int64_t last = n - first < CHUNK ? n : first + CHUNK;
        if (dtype == COLIBRI_F32) /* the size is a constant in each call, so each loop is compiled for its own */
            look_f32(&total, src, mask, first, last);
        else
            look(&total, src, 2, mask, first, last);
    }
    return total;
}

colibri_census census(const void *src, colibri_dtype dtype, int64_t n)
{
    sentinel found = sentinel_scan(src, dtype, n);
    return (colibri_census){found.n_nan, found.n_inf, found.n_subnormal, found.first};
}
