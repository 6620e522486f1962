/* numbers.h: what the tests of kernels share: seeded random floats with every special value among them, memory that ends at a
 * page nobody may touch, and comparison by bytes in which every NaN is the same NaN.
 *
 * Define _DEFAULT_SOURCE before the first include (for MAP_ANONYMOUS). */
#ifndef COLIBRI_TESTS_NUMBERS_H
#define COLIBRI_TESTS_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../csrc/kernels/float32.h"
#include "check.h"

/* xorshift64*: the same numbers on every machine. */
static uint64_t random_state = 0x9e3779b97f4a7c15;

static inline uint32_t random_bits(void)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545f4914f6cdd1d) >> 32);
}

static inline int random_below(int n)
{
    return (int)(random_bits() % (uint32_t)n);
}

static inline float random_uniform(void) /* -1 .. 1 */
{
    return (float)((int32_t)random_bits() / 2147483648.0);
}

enum mood {
    CALM,  /* numbers between -1 and 1 */
    TINY,  /* so small that products underflow to -0 and +0, sums stay subnormal, and zeros of both signs */
    WILD,  /* any bit pattern of a finite number */
    SICK,  /* mostly calm; now and then NaN, Inf, the largest number, a subnormal, -0 */
    N_MOODS
};

static inline float random_float(enum mood mood)
{
    static const float special[] = {NAN,         INFINITY,         -INFINITY,         -0.0f, 0.0f,    0x1p-149f,
                                    -0x1p-140f, 0x1.fffffep127f, -0x1.fffffep127f, 88.9f, -104.5f};
    if (mood == TINY)
        return random_below(4) == 0 ? (random_below(2) ? 0.0f : -0.0f) : random_uniform() * 0x1p-75f;
    if (mood == WILD) {
        uint32_t bits = random_bits();
        return float_from_bits((bits & 0x7f800000) == 0x7f800000 ? bits ^ 0x40000000 : bits);
    }
    if (mood == SICK && random_below(12) == 0)
        return special[random_below((int)(sizeof special / sizeof special[0]))];
    return random_uniform() * 4;
}

/* Truncated to the dtype's bits: a value of that dtype, written at `to`. */
static inline void put_as(void *to, colibri_dtype dtype, float value)
{
    uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 255;
    uint16_t half = (uint16_t)(bits >> 16);
    if (dtype == COLIBRI_F32) {
        memcpy(to, &bits, 4);
        return;
    }
    if (dtype == COLIBRI_BF16 && value != value)
        half |= 1;
    if (dtype == COLIBRI_F16) {
        if (exponent == 255)
            half = (uint16_t)(sign | 0x7c00 | (value != value ? 0x155 : 0));
        else if (exponent < 113) /* random subnormals and zeros */
            half = (uint16_t)(sign | (exponent == 0 ? 0 : bits >> 13 & 0x3ff));
        else
            half = (uint16_t)(sign | (exponent > 142 ? 0x7bff : (exponent - 112) << 10 | (bits >> 13 & 0x3ff)));
    }
    memcpy(to, &half, 2);
}

/* n_bytes that end `slack` bytes before a page without access; slack 0 catches any read or write beyond the end. */
typedef struct guarded {
    unsigned char *map, *data;
    size_t map_bytes;
} guarded;

static inline guarded guarded_new(size_t n_bytes, size_t slack)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (n_bytes + slack + page - 1) / page * page;
    guarded g = {.map_bytes = body + page};
    void *map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(map != MAP_FAILED);
    g.map = map;
    CHECK(mprotect(g.map + body, page, PROT_NONE) == 0);
    g.data = g.map + body - slack - n_bytes;
    return g;
}

static inline void guarded_free(guarded g)
{
    munmap(g.map, g.map_bytes);
}

static inline bool same_number(float a, float b)
{
    return a != a ? b != b : float_bits(a) == float_bits(b);
}

static inline bool same_numbers(const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!same_number(a[i], b[i])) {
            fprintf(stderr, "element %d of %d: %a and %a\n", (int)i, (int)n, (double)a[i], (double)b[i]);
            return false;
        }
    return true;
}

/* Distance of y from the true value in units of the last place of a float32 near it. */
static inline double ulps(float y, long double exact)
{
    int exponent = exact == 0 ? -126 : ilogbl(exact);
    return (double)(fabsl((long double)y - exact) / ldexpl(1, (exponent < -126 ? -126 : exponent) - 23));
}

#endif
