/* counters.c: what the CPU counts of itself, where the system gives it (Linux: perf_event_open), or the reason why not.
 *
 * The counters of a thread are inherited by the threads that it makes, and a read adds up the live ones. Each counter is a file
 * of its own: older kernels refuse to inherit a group. */
#define _GNU_SOURCE /* syscall */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../include/colibri_cachelab.h"

enum { UNREADABLE = -100 };

#if defined(__linux__)
#include <linux/perf_event.h>
#include <sys/syscall.h>

#define READ_MISS(cache) \
    ((cache) | PERF_COUNT_HW_CACHE_OP_READ << 8 | PERF_COUNT_HW_CACHE_RESULT_MISS << 16)

static const struct {
    uint32_t type;
    uint64_t config;
} events[CACHELAB_COUNTERS] = {
    {PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES},
    {PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS},
    {PERF_TYPE_HW_CACHE, READ_MISS(PERF_COUNT_HW_CACHE_L1D)},
    {PERF_TYPE_HW_CACHE, READ_MISS(PERF_COUNT_HW_CACHE_LL)},
    {PERF_TYPE_HW_CACHE, READ_MISS(PERF_COUNT_HW_CACHE_DTLB)},
};

int cachelab_open_system_event(uint32_t type, uint64_t config)
{
    struct perf_event_attr a;
    memset(&a, 0, sizeof a);
    a.size = sizeof a;
    a.type = type;
    a.config = config;
    a.inherit = 1;
    a.exclude_kernel = 1; /* what any user may count of his own processes */
    a.exclude_hv = 1;
    a.read_format = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING;
    return (int)syscall(SYS_perf_event_open, &a, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
}

#else

static const struct {
    uint32_t type;
    uint64_t config;
} events[CACHELAB_COUNTERS];

int cachelab_open_system_event(uint32_t type, uint64_t config)
{
    (void)type;
    (void)config;
    errno = ENOSYS;
    return -1;
}

#endif

const char *cachelab_counter_name(int counter)
{
    static const char *const names[CACHELAB_COUNTERS] = {"cycles", "instructions", "l1d_misses", "llc_misses", "dtlb_misses"};
    return names[counter];
}

double cachelab_scaled(cachelab_count c)
{
    return c.running == 0 ? NAN : (double)c.value * ((double)c.enabled / (double)c.running);
}

void cachelab_counters_open(cachelab_counters *c, cachelab_open_event open_event)
{
    for (int i = 0; i < CACHELAB_COUNTERS; i++) {
        errno = 0;
        c->files[i] = open_event(events[i].type, events[i].config);
        c->errors[i] = c->files[i] < 0 ? errno : 0;
    }
}

void cachelab_counters_close(cachelab_counters *c)
{
    for (int i = 0; i < CACHELAB_COUNTERS; i++)
        if (c->files[i] >= 0) {
            close(c->files[i]);
            c->files[i] = -1;
        }
}

void cachelab_counters_read(const cachelab_counters *c, cachelab_count out[CACHELAB_COUNTERS])
{
    for (int i = 0; i < CACHELAB_COUNTERS; i++)
        if (c->files[i] < 0 || read(c->files[i], &out[i], sizeof out[i]) != (ssize_t)sizeof out[i])
            out[i] = (cachelab_count){0, 0, 0};
}

int cachelab_perf_event_paranoid(void)
{
    int level = UNREADABLE;
    FILE *file = fopen("/proc/sys/kernel/perf_event_paranoid", "r");
    if (file == NULL)
        return UNREADABLE;
    if (fscanf(file, "%d", &level) != 1)
        level = UNREADABLE;
    fclose(file);
    return level;
}

void cachelab_counter_reason(int error, int paranoid, char out[CACHELAB_REASON_SIZE])
{
    static const char head[] = "not available here: ";
    switch (error) {
    case EACCES:
    case EPERM:
        if (paranoid > 2)
            snprintf(out, CACHELAB_REASON_SIZE, "%sperf_event_paranoid is %d; 2 or less lets a user count", head, paranoid);
        else
            snprintf(out, CACHELAB_REASON_SIZE, "%sthe system forbids perf_event_open to this process (a container often does)",
                     head);
        return;
    case ENOENT:
    case EOPNOTSUPP:
    case ENODEV:
        snprintf(out, CACHELAB_REASON_SIZE, "%sthis CPU, or the virtual machine, has no such event", head);
        return;
    case ENOSYS:
        snprintf(out, CACHELAB_REASON_SIZE, "%sthis system has no perf_event_open", head);
        return;
    case EMFILE:
    case ENFILE:
        snprintf(out, CACHELAB_REASON_SIZE, "%stoo many files are open", head);
        return;
    default: snprintf(out, CACHELAB_REASON_SIZE, "%sperf_event_open says: %s", head, strerror(error));
    }
}
