/* fma.c: multiply-adds that wait for nothing, for each instruction set that the engine has kernels for.
 *
 * 12 chains that do not depend on each other cover a latency of 4 cycles on 2 or 3 units. Where the instruction set has no fused
 * multiply-add it is a multiplication and an addition. */
#include <math.h>
#include <string.h>

#include "../include/colibri_cachelab.h"

enum { CHAINS = 12 };

typedef float (*chains)(int64_t rounds, float seed);

/* FIRST: what stands before the function; SET and STEP: a vector of one value, and a * x + y. The sum of the first lanes keeps a
 * compiler from leaving the work out. */
#define CHAINS_OF(NAME, FIRST, VECTOR, SET, STEP)                                                                                \
    FIRST static float NAME(int64_t rounds, float seed)                                                                          \
    {                                                                                                                            \
        VECTOR a[CHAINS], x = SET(0.999999f), y = SET(seed * 1e-6f);                                                             \
        float sum = 0, lane;                                                                                                     \
        for (int c = 0; c < CHAINS; c++)                                                                                         \
            a[c] = SET((float)c);                                                                                                \
        for (int64_t r = 0; r < rounds; r++)                                                                                     \
            for (int c = 0; c < CHAINS; c++)                                                                                     \
                a[c] = STEP(a[c], x, y);                                                                                         \
        for (int c = 0; c < CHAINS; c++) {                                                                                       \
            memcpy(&lane, &a[c], sizeof lane);                                                                                   \
            sum += lane;                                                                                                         \
        }                                                                                                                        \
        return sum;                                                                                                              \
    }

typedef struct instruction_set {
    const char *name; /* as colibri_isa gives it */
    int lanes;
    chains run;
    bool (*is_here)(void);
} instruction_set;

#if defined(__x86_64__)
#include <immintrin.h>

#define NEEDS(set) __attribute__((target(set)))
#define MUL_ADD(a, x, y) _mm_add_ps(_mm_mul_ps(a, x), y)
#define MUL_ADD_ONE(a, x, y) _mm_add_ss(_mm_mul_ss(a, x), y)

CHAINS_OF(chains_avx512, NEEDS("avx512f"), __m512, _mm512_set1_ps, _mm512_fmadd_ps)
CHAINS_OF(chains_avx2, NEEDS("avx2,fma"), __m256, _mm256_set1_ps, _mm256_fmadd_ps)
CHAINS_OF(chains_sse2, , __m128, _mm_set1_ps, MUL_ADD)
CHAINS_OF(chains_scalar_fma, NEEDS("fma"), __m128, _mm_set_ss, _mm_fmadd_ss)
CHAINS_OF(chains_scalar, , __m128, _mm_set_ss, MUL_ADD_ONE)

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f");
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_fma(void)
{
    return __builtin_cpu_supports("fma");
}

static bool always(void)
{
    return true;
}

static const instruction_set sets[] = {
    {"avx512", 16, chains_avx512, has_avx512}, {"avx2", 8, chains_avx2, has_avx2},     {"sse2", 4, chains_sse2, always},
    {"scalar", 1, chains_scalar_fma, has_fma}, {"scalar", 1, chains_scalar, always},
};

#else

#define SAME(value) (value)

static inline float mul_add_one(float a, float x, float y)
{
    a = fmaf(a, x, y);
#if defined(__aarch64__)
    __asm__("" : "+w"(a)); /* a register of its own: compilers would make vectors of the chains */
#endif
    return a;
}

CHAINS_OF(chains_scalar, , float, SAME, mul_add_one)

static bool always(void)
{
    return true;
}

#if defined(__aarch64__)
#include <arm_neon.h>
#define MUL_ADD(a, x, y) vfmaq_f32(y, a, x)
CHAINS_OF(chains_neon, , float32x4_t, vdupq_n_f32, MUL_ADD)
static const instruction_set sets[] = {{"neon", 4, chains_neon, always}, {"scalar", 1, chains_scalar, always}};
#else
static const instruction_set sets[] = {{"scalar", 1, chains_scalar, always}};
#endif

#endif

float cachelab_fma_chains(const char *isa, int64_t rounds, float seed, double *operations)
{
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if ((isa == NULL || strcmp(isa, sets[i].name) == 0) && sets[i].is_here()) {
            *operations = 2.0 * (double)rounds * CHAINS * sets[i].lanes;
            return sets[i].run(rounds, seed);
        }
    *operations = 0;
    return 0;
}
