/* selection.c: four ways to choose the two best experts, as a shared library for claims/selection.py. It is compiled together
 * with the engine's own topk.c. */
#include <stdlib.h>

#include "../../csrc/kernels/kernels.h"
#include "clock.h"

enum { NETWORK, QSORT, SCAN, PUBLISHED };

typedef struct scored {
    float score;
    int32_t id;
} scored;

static int by_score(const void *a, const void *b) { /* descending, ties to the lower id */
    const scored *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? 1 : -1;
    return x->id - y->id;
}

static void sort_two(int32_t *ids, const float *scores, int64_t n) {
    scored all[COLIBRI_MAX_EXPERTS];
    for (int64_t i = 0; i < n; i++) all[i] = (scored){scores[i], (int32_t)i};
    qsort(all, (size_t)n, sizeof *all, by_score);
    ids[0] = all[0].id;
    ids[1] = all[1].id;
}

/* What one would write first: a walk that remembers the best two. */
static void scan_two(int32_t *ids, const float *scores, int64_t n) {
    int32_t first = scores[1] > scores[0], second = !first;
    for (int32_t i = 2; i < n; i++) {
        if (scores[i] > scores[first]) {
            second = first;
            first = i;
        } else if (scores[i] > scores[second]) {
            second = i;
        }
    }
    ids[0] = first;
    ids[1] = second;
}

static void larger_first(scored *a, scored *b) {
    const scored x = *a, y = *b;
    const int swap = x.score < y.score;
    *a = swap ? y : x;
    *b = swap ? x : y;
}

/* The steps of the published function, in our own words: neighbours are put in order, then slots 0 and 1, and those two are the
 * answer. What stands beyond slot 1 can never get there. */
static void published_two(int32_t *ids, const float *scores, int64_t n) {
    scored all[COLIBRI_MAX_EXPERTS];
    for (int64_t i = 0; i < n; i++) all[i] = (scored){scores[i], (int32_t)i};
    for (int64_t i = 0; i + 1 < n; i += 2) larger_first(&all[i], &all[i + 1]);
    larger_first(&all[0], &all[1]);
    ids[0] = all[0].id;
    ids[1] = all[1].id;
}

/* scores [rows, n] -> ids [rows, 2], `repeats` times; the seconds of it all. n >= 2. */
double select_seconds(int method, const float *scores, int64_t rows, int64_t n, int64_t repeats, int32_t *ids) {
    static uint64_t scratch[COLIBRI_MAX_EXPERTS];
    const double begin = now();
    for (int64_t r = 0; r < repeats; r++) {
        for (int64_t i = 0; i < rows; i++) {
            const float *row = scores + i * n;
            int32_t *out = ids + i * 2;
            switch (method) {
            case NETWORK: topk(out, row, n, 2, scratch); break;
            case QSORT: sort_two(out, row, n); break;
            case SCAN: scan_two(out, row, n); break;
            default: published_two(out, row, n);
            }
        }
    }
    return now() - begin;
}
