/* fma_peak.h: the fused multiply-adds that this machine does in a second when nothing waits for memory.
 *
 * Vectors of the compiler's own kind, as wide as the machine has them; 12 chains that do not depend on each other cover a latency
 * of 4 cycles on 2 or 3 units. Compile with -O2 or more, -ffp-contract=fast and the machine's own instruction set. */
#ifndef COLIBRI_BENCH_FMA_PEAK_H
#define COLIBRI_BENCH_FMA_PEAK_H

#include <stdint.h>

#if defined(__AVX512F__)
#define FMA_BYTES 64
#elif defined(__AVX__)
#define FMA_BYTES 32
#else
#define FMA_BYTES 16
#endif
enum { FMA_CHAINS = 12, FMA_LANES = FMA_BYTES / 4 };

typedef float fma_vector __attribute__((vector_size(FMA_BYTES)));

/* Runs `rounds` multiply-adds on each chain; returns a value so that no compiler leaves them out. Floating-point operations:
 * fma_operations(rounds). */
static float fma_chains(int64_t rounds, float seed) {
    fma_vector a[FMA_CHAINS], x = {0}, y = {0};
    x += 0.999999f;
    y += seed * 1e-6f;
    for (int c = 0; c < FMA_CHAINS; c++) a[c] = y + (float)c;
    for (int64_t r = 0; r < rounds; r++) {
        for (int c = 0; c < FMA_CHAINS; c++) a[c] = a[c] * x + y;
    }
    float sum = 0.0f;
    for (int c = 0; c < FMA_CHAINS; c++) {
        for (int i = 0; i < FMA_LANES; i++) sum += a[c][i];
    }
    return sum;
}

static double fma_operations(int64_t rounds) { return 2.0 * (double)rounds * FMA_CHAINS * FMA_LANES; }

#endif
