/* select.c: which table of kernels runs. The whole policy is the ladder in find_tables(), best to plain; it is walked once per
 * process. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../utils/status.h"
#include "tables.h"

#if defined(__x86_64__)
#include <cpuid.h>

typedef struct cpu {
    bool fma, avx2, avx512; /* the CPU has it, and the operating system saves its registers */
} cpu;

/* XCR0: which register files the operating system saves. */
static uint32_t enabled_states(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static cpu detect(void)
{
    const uint32_t avx_states = 0x06, avx512_states = 0xe6; /* xmm, ymm; and opmask, upper zmm, zmm16-31 */
    cpu found = {false, false, false};
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return found;
    uint32_t states = enabled_states();
    bool f16c = c & bit_F16C;
    found.fma = (c & bit_AVX) && (c & bit_FMA) && (states & avx_states) == avx_states;
    if (!found.fma || !f16c || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return found;
    found.avx2 = b & bit_AVX2;
    found.avx512 = found.avx2 && (b & bit_AVX512F) && (b & bit_AVX512DQ) && (b & bit_AVX512BW) && (b & bit_AVX512VL) &&
                   (states & avx512_states) == avx512_states;
    return found;
}
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const kernels *available[4];
static size_t n_available;
static const kernels *in_force;
static char requested[32]; /* COLIBRI_ISA, cut; empty when not set */

static void find_tables(void)
{
#if defined(__x86_64__)
    cpu found = detect();
    if (found.avx512)
        available[n_available++] = &kernels_avx512;
    if (found.avx2)
        available[n_available++] = &kernels_avx2;
    available[n_available++] = &kernels_sse2;
    available[n_available++] = found.fma ? &kernels_scalar_fma : &kernels_scalar;
#else
#if defined(__aarch64__)
    available[n_available++] = &kernels_neon;
#endif
    available[n_available++] = &kernels_scalar;
#endif

    const char *name = getenv("COLIBRI_ISA");
    in_force = available[0];
    if (name == NULL)
        return;
    strncpy(requested, name, sizeof requested - 1);
    for (size_t i = 0; i < n_available; i++)
        if (strcmp(requested, available[i]->name) == 0)
            in_force = available[i];
}

const kernels *kernels_in_force(void)
{
    pthread_once(&once, find_tables);
    return in_force;
}

size_t kernels_available(const kernels *const **tables)
{
    pthread_once(&once, find_tables);
    *tables = available;
    return n_available;
}

colibri_status kernels_select(colibri_message *message)
{
    pthread_once(&once, find_tables);
    if (requested[0] == '\0' || strcmp(requested, in_force->name) == 0)
        return COLIBRI_OK;
    char names[64] = "";
    for (size_t i = 0; i < n_available; i++) {
        strcat(names, i > 0 ? ", " : "");
        strcat(names, available[i]->name);
    }
    return fail(message, COLIBRI_ERROR_UNSUPPORTED, "COLIBRI_ISA=%s is not available here; this build and CPU can run: %s",
                requested, names);
}
