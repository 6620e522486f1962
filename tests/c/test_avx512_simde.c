/* test_avx512_simde.c: the AVX-512 kernels, compiled through SIMDe's emulation of the intrinsics, against the scalar definition
 * by bytes.
 *
 * So their code is executed on CPUs without AVX-512 too. The build compiles this file with AVX2 and FMA, into which SIMDe
 * translates; without SIMDe, or on a CPU without AVX2, the program says that nothing was compared. */
#define _DEFAULT_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(__has_include) && defined(__AVX2__) && defined(__FMA__)
#if __has_include(<simde/x86/avx512.h>)
#define HAVE_EMULATION
#endif
#endif

#if defined(HAVE_EMULATION)
#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma GCC diagnostic ignored "-Wpedantic" /* SIMDe's headers */
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

/* Six intrinsics that SIMDe 0.7 lacks, element by element. */
static inline simde__m512i emulated_widen_u16(simde__m256i halves)
{
    uint16_t from[16];
    uint32_t to[16];
    memcpy(from, &halves, sizeof from);
    for (int i = 0; i < 16; i++)
        to[i] = from[i];
    return simde_mm512_loadu_si512(to);
}

static inline simde__m512 emulated_widen_f16(simde__m256i halves)
{
    float to[16];
    simde_mm256_storeu_ps(to, simde_mm256_cvtph_ps(simde_mm256_extractf128_si256(halves, 0)));
    simde_mm256_storeu_ps(to + 8, simde_mm256_cvtph_ps(simde_mm256_extractf128_si256(halves, 1)));
    return simde_mm512_loadu_ps(to);
}

static inline simde__m256 emulated_half(simde__m512 a, int which)
{
    float from[16];
    simde_mm512_storeu_ps(from, a);
    return simde_mm256_loadu_ps(from + 8 * which);
}

static inline simde__m512 emulated_masked_load(unsigned mask, const void *p) /* touches the chosen elements only */
{
    float to[16];
    for (int i = 0; i < 16; i++) {
        to[i] = 0;
        if (mask >> i & 1)
            memcpy(to + i, (const unsigned char *)p + 4 * i, 4);
    }
    return simde_mm512_loadu_ps(to);
}

static inline void emulated_masked_store(void *p, unsigned mask, simde__m512 a)
{
    float from[16];
    simde_mm512_storeu_ps(from, a);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy((unsigned char *)p + 4 * i, from + i, 4);
}

static inline simde__m512i emulated_shift_right(simde__m512i a, int count)
{
    int32_t lanes[16];
    memcpy(lanes, &a, sizeof lanes);
    for (int i = 0; i < 16; i++)
        lanes[i] = (lanes[i] & INT32_MIN) ? ~(~lanes[i] >> count) : lanes[i] >> count;
    return simde_mm512_loadu_si512(lanes);
}

#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtph_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#undef _mm512_srai_epi32
#define _mm512_cvtepu16_epi32 emulated_widen_u16
#define _mm512_cvtph_ps emulated_widen_f16
#define _mm512_extractf32x8_ps emulated_half
#define _mm512_maskz_loadu_ps emulated_masked_load
#define _mm512_mask_storeu_ps emulated_masked_store
#define _mm512_srai_epi32 emulated_shift_right

#define kernels_avx512 emulated_avx512 /* a table of its own beside the library's */
#define COLIBRI_EMULATE_AVX512
#include "../../csrc/kernels/kernels_avx512.c"

#include "kernel_checks.h"

static void test_avx512_gives_the_bytes_of_the_scalar_table(void)
{
    check_table(&emulated_avx512);
}

int main(void)
{
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t < n_tables; t++)
        if (tables[t] == &kernels_avx2) {
            RUN(test_avx512_gives_the_bytes_of_the_scalar_table);
            return 0;
        }
    printf("not run: this CPU has no AVX2\n");
    return 0;
}
#else
int main(void)
{
    printf("not run: SIMDe's headers are missing, or this is not x86-64\n");
    return 0;
}
#endif
