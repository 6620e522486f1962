#include "aggregator.h"

#include <string.h>

#include "../kernels/rounding.h"
#include "boundary.h"

/* One step of a weighted sum, which is kept in a format. */
static void add_scaled(const machine *m, float *acc, float factor, const float *x, int64_t n, colibri_format sums)
{
    if (sums != COLIBRI_FLOAT32)
        rounded_add_scaled(acc, factor, x, n, sums);
    else
        m->kernels->add_scaled(acc, factor, x, n);
}

typedef struct routed_job {
    machine *machine;
    float *routed;
    const float *packed, *gates;
    const int64_t *places;
    int64_t k, width;
    colibri_format sums;
} routed_job;

static void routed_work(void *argument, int64_t first, int64_t last, int thread)
{
    routed_job *j = argument;
    (void)thread;
    for (int64_t t = first; t < last; t++) {
        float *sum = j->routed + t * j->width;
        memset(sum, 0, (size_t)j->width * sizeof(float));
        for (int64_t s = t * j->k; s < (t + 1) * j->k; s++)
            if (j->places[s] >= 0)
                add_scaled(j->machine, sum, j->gates[s], j->packed + j->places[s] * j->width, j->width, j->sums);
    }
}

void aggregate_routed(machine *m, float *routed, const float *packed, const float *gates, const int64_t *places, int64_t n,
                      int64_t k, int64_t width)
{
    routed_job job = {m, routed, packed, gates, places, k, width,
                      emulated(m->boundary, POINT_MOE_ROUTED).accumulation};
    machine_run(m, routed_work, &job, n, n * k * width);
}

typedef struct shared_job {
    machine *machine;
    float *out;
    const float *routed, *shared, *gate;
    int64_t width;
    colibri_format sums;
} shared_job;

static void shared_work(void *argument, int64_t first, int64_t last, int thread)
{
    shared_job *j = argument;
    (void)thread;
    for (int64_t t = first; t < last; t++) {
        float *out = j->out + t * j->width;
        memcpy(out, j->routed + t * j->width, (size_t)j->width * sizeof(float));
        add_scaled(j->machine, out, j->gate[t], j->shared + t * j->width, j->width, j->sums);
    }
}

void aggregate_shared(machine *m, float *out, const float *routed, const float *shared, const float *gate, int64_t n,
                      int64_t width)
{
    shared_job job = {m, out, routed, shared, gate, width, emulated(m->boundary, POINT_MOE_OUTPUT).accumulation};
    machine_run(m, shared_work, &job, n, n * width);
}
