/* stages.c: what each stage of a pass took, summed by layer and stage. */
#include <sys/resource.h>
#include <time.h>

#include "../include/colibri_cachelab.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The clock is read last as a stage begins and first as it ends, so that no call of ours lies in its time. */
static void begin(cachelab_stages *s)
{
    struct rusage use;
    if (s->faults && getrusage(RUSAGE_SELF, &use) == 0) {
        s->begin.minor_faults = use.ru_minflt;
        s->begin.major_faults = use.ru_majflt;
    }
    if (s->counters != NULL)
        cachelab_counters_read(s->counters, s->begin.counts);
    s->begin.seconds = now();
}

static void end(cachelab_stages *s, cachelab_stage_sum *sum)
{
    struct rusage use;
    cachelab_count counts[CACHELAB_COUNTERS];
    sum->seconds += now() - s->begin.seconds;
    sum->calls++;
    if (s->counters != NULL) {
        cachelab_counters_read(s->counters, counts);
        for (int i = 0; i < CACHELAB_COUNTERS; i++) {
            sum->counts[i].value += counts[i].value - s->begin.counts[i].value;
            sum->counts[i].enabled += counts[i].enabled - s->begin.counts[i].enabled;
            sum->counts[i].running += counts[i].running - s->begin.counts[i].running;
        }
    }
    if (s->faults && getrusage(RUSAGE_SELF, &use) == 0) {
        sum->minor_faults += use.ru_minflt - s->begin.minor_faults;
        sum->major_faults += use.ru_majflt - s->begin.major_faults;
    }
}

void cachelab_stages_observe(void *stages, const colibri_stage_event *event)
{
    cachelab_stages *s = stages;
    int64_t layer = event->place.layer < 0 ? s->n_layers : event->place.layer;
    if (event->n > s->tile_tokens)
        s->tile_tokens = event->n;
    if (event->begins)
        begin(s);
    else
        end(s, &s->sums[layer * CACHELAB_STAGES + event->place.stage]);
}
