/* kernel.c: the matrix product alone, against the multiply-adds that the machine can do in the same seconds.
 *
 *   kernel THREADS MEGABYTES SECONDS
 *
 * Weights of MEGABYTES lie in memory as matrices of the size that an expert has ([3584, 1024] and [1024, 3584]); each call takes
 * the next matrix, so weights come from memory and not from a cache. Pages are 4 KiB, as those of a mapped file. One line of JSON
 * for each (dtype, K, rows): GFLOP/s, and the peak just before and just after. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../../csrc/include/colibri_cachelab.h"
#include "../../csrc/kernels/kernels.h"
#include "../../csrc/utils/threads.h"
#include "clock.h"

enum { MAX_ROWS = 64, WIDE = 3584, NARROW = 1024 };

static int64_t room_floats(void) { return matmul_scratch(WIDE) + packed_floats(MAX_ROWS, WIDE); }

typedef struct job {
    const kernels *k;
    matrix w;
    const float *x;
    float *room, *out; /* room: of each thread, for a product: scratch, packed rows */
    int64_t rows, fma_rounds;
    double operations[COLIBRI_MAX_THREADS];
    volatile float sink[COLIBRI_MAX_THREADS];
} job;

static void multiply(void *argument, int64_t first, int64_t last, int thread) {
    const job *j = argument;
    float *scratch = j->room + thread * room_floats(), *packed = scratch + matmul_scratch(WIDE);
    if (j->rows > 1) j->k->pack(packed, j->x, j->w.cols, j->rows, j->w.cols);
    j->k->matmul(j->out, j->w.rows, j->rows > 1 ? packed : j->x, j->rows, &j->w, NULL, first, last, scratch);
}

static void fma_only(void *argument, int64_t first, int64_t last, int thread) {
    job *j = argument;
    (void)last;
    j->sink[thread] = cachelab_fma_chains(NULL, j->fma_rounds, (float)(first + 1), &j->operations[first]);
}

static double peak(threads *pool, job *j) { /* GFLOP/s */
    const int n = threads_count(pool);
    j->fma_rounds = 20000000;
    const double begin = now();
    threads_run(pool, fma_only, j, n);
    return j->operations[0] * n / (now() - begin) * 1e-9;
}

static void measure(threads *pool, job *j, unsigned char *weights, size_t n_bytes, colibri_dtype dtype, int64_t cols,
                    double seconds) {
    static const int row_counts[] = {1, 2, 4, 16, 64};
    const size_t element = dtype == COLIBRI_F32 ? 4 : 2;
    const int64_t rows = cols == NARROW ? WIDE : NARROW;
    const size_t one = (size_t)(rows * cols) * element, count = n_bytes / one;
    for (size_t i = 0; i < n_bytes / element; i++) { /* 1 + a little noise: the bits of 0x3F8x in both dtypes */
        const uint32_t bits = 0x3F800000u + (uint32_t)((i * 2654435761u) & 0x7F0000u);
        if (element == 4) memcpy(weights + 4 * i, &bits, 4);
        else memcpy(weights + 2 * i, &(uint16_t){(uint16_t)(bits >> 16)}, 2);
    }
    for (size_t c = 0; c < sizeof row_counts / sizeof *row_counts; c++) {
        j->rows = row_counts[c];
        const double before = peak(pool, j), begin = now();
        double spent = 0.0;
        int64_t calls = 0;
        while (spent < seconds || calls < (int64_t)count) { /* every matrix at least once */
            j->w = (matrix){weights + (size_t)calls % count * one, dtype, rows, cols};
            threads_run(pool, multiply, j, rows);
            calls++;
            spent = now() - begin;
        }
        const double rate = 2.0 * (double)(rows * cols * j->rows) * (double)calls / spent * 1e-9;
        printf("{\"isa\": \"%s\", \"dtype\": \"%s\", \"K\": %d, \"rows\": %d, ", j->k->name, element == 4 ? "f32" : "bf16", (int)cols,
               (int)j->rows);
        printf("\"gflops\": %.3f, \"before\": %.3f, \"after\": %.3f}\n", rate, before, peak(pool, j));
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    colibri_message message;
    threads *pool = NULL;
    if (argc != 4 || kernels_select(&message) != COLIBRI_OK || threads_create(atoi(argv[1]), &pool, &message) != COLIBRI_OK) {
        fprintf(stderr, "kernel THREADS MEGABYTES SECONDS: %s\n", argc != 4 ? "three arguments" : message.text);
        return 1;
    }
    const size_t n_bytes = (size_t)atol(argv[2]) << 20;
    unsigned char *weights = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    float *x = malloc(sizeof(float) * MAX_ROWS * WIDE), *out = malloc(sizeof(float) * MAX_ROWS * WIDE);
    float *room = malloc(sizeof(float) * (size_t)(room_floats() * threads_count(pool)));
    if (weights == MAP_FAILED || x == NULL || out == NULL || room == NULL) {
        fprintf(stderr, "no memory\n");
        return 1;
    }
#ifdef MADV_NOHUGEPAGE
    madvise(weights, n_bytes, MADV_NOHUGEPAGE);
#endif
    for (size_t i = 0; i < (size_t)MAX_ROWS * WIDE; i++) x[i] = (float)(i % 17) * 0.125f - 1.0f;
    job j = {.k = kernels_in_force(), .x = x, .room = room, .out = out};
    for (int d = 0; d < 2; d++) {
        measure(pool, &j, weights, n_bytes, d ? COLIBRI_BF16 : COLIBRI_F32, NARROW, atof(argv[3]));
        measure(pool, &j, weights, n_bytes, d ? COLIBRI_BF16 : COLIBRI_F32, WIDE, atof(argv[3]));
    }
    threads_free(pool);
    return 0;
}
