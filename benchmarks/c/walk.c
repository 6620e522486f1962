/* walk.c: walk LAYOUT: reads the weights of one token's experts as a matrix-vector product does, for a simulator of caches.
 * LAYOUT is "interleaved" (an expert's matrices side by side) or "by matrix" (all gates, all ups, all downs). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

enum { EXPERTS = 64, CHOSEN = 8, WIDTH = 512, HIDDEN = 1024, MATRIX = WIDTH * HIDDEN, LANES = VECTOR_BYTES / 4 };

static float row_product(const float *w, const float *x, int n) {
    vector sum = {0};
    for (int i = 0; i < n; i += LANES) {
        vector a, b;
        memcpy(&a, w + i, sizeof a);
        memcpy(&b, x + i, sizeof b);
        sum += a * b;
    }
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += sum[i];
    return total;
}

int main(int argc, char **argv) {
    const int interleaved = argc == 2 && strcmp(argv[1], "interleaved") == 0;
    if (!interleaved && (argc != 2 || strcmp(argv[1], "by matrix") != 0)) {
        fprintf(stderr, "walk: interleaved or 'by matrix'\n");
        return 1;
    }
    float *weights = calloc((size_t)EXPERTS * 3 * MATRIX, sizeof *weights), x[HIDDEN] = {0}, total = 0.0f;
    if (weights == NULL) return 1;
    for (int e = 0; e < CHOSEN; e++) {
        const int expert = (e * 29 + 5) % EXPERTS;
        for (int m = 0; m < 3; m++) {
            const size_t place = interleaved ? (size_t)(3 * expert + m) : (size_t)(m * EXPERTS + expert);
            const int cols = m < 2 ? HIDDEN : WIDTH;
            const float *w = weights + place * MATRIX;
            for (int r = 0; r < MATRIX / cols; r++) total += row_product(w + (size_t)r * (size_t)cols, x, cols);
        }
    }
    printf("%g\n", (double)total);
    free(weights);
    return 0;
}
