#include "dispatcher.h"

#include <string.h>

int64_t dispatch_plan(const dispatch *d, const int32_t *ids, int64_t n, int64_t k, int64_t n_experts, int64_t first_token,
                      int64_t first_row)
{
    /* A counting sort. offsets[e + 1] counts expert e, then becomes the first row of expert e as next to be filled; once all rows
     * are placed it has advanced to the first row of expert e + 1, which is what it must say. Each id is read once and kept where
     * its place will stand: somebody may be writing to the ids of an open pass meanwhile. */
    int64_t *next = d->offsets + 1;
    memset(d->offsets, 0, (size_t)(n_experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < n * k; i++) {
        int64_t e = ids[i];
        d->places[i] = e >= 0 && e < n_experts ? e : -1;
        if (d->places[i] >= 0)
            next[e]++;
    }

    int64_t row = 0;
    for (int64_t e = 0; e < n_experts; e++) {
        int64_t count = next[e];
        next[e] = row;
        row += count;
    }
    for (int64_t i = 0; i < n * k; i++) {
        if (d->places[i] < 0)
            continue;
        int64_t place = next[d->places[i]]++;
        d->places[i] = place;
        d->tokens[place] = (int32_t)(first_token + i / k);
    }
    for (int64_t r = row; r < n * k; r++)
        d->tokens[r] = -1;
    for (int64_t e = 0; e <= n_experts; e++)
        d->offsets[e] += first_row;
    return row;
}

typedef struct gather_job {
    float *packed;
    const float *x;
    const int32_t *tokens;
    int64_t first_token, width;
} gather_job;

static void gather_work(void *argument, int64_t first, int64_t last, int thread)
{
    gather_job *j = argument;
    (void)thread;
    for (int64_t r = first; r < last; r++)
        memcpy(j->packed + r * j->width, j->x + (j->tokens[r] - j->first_token) * j->width, (size_t)j->width * sizeof(float));
}

void dispatch_gather(machine *m, float *packed, const float *x, const int32_t *tokens, int64_t first_token, int64_t n_rows,
                     int64_t width)
{
    gather_job job = {packed, x, tokens, first_token, width};
    machine_run(m, gather_work, &job, n_rows, n_rows * width);
}
