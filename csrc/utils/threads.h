/* threads.h: a small pool of persistent workers with a static partition.
 *
 * run(pool, work, argument, n) splits 0 <= i < n into one contiguous range per thread and calls work(argument, first, last,
 * thread) on each; the caller's thread is thread 0 and takes part, also of ranges whose thread the system does not run at the
 * moment: `thread` says whose scratch is free, not which range it is. It returns when all are done. The partition depends only on n
 * and the thread count; results may not depend on it at all. A part may be empty; then work is not called for it. A pool is used
 * by one caller at a time.
 *
 * After fork the child has no workers: threads_run does the same parts on the caller's thread, and threads_free only gives memory
 * back. */
#ifndef COLIBRI_THREADS_H
#define COLIBRI_THREADS_H

#include "status.h"

typedef struct threads threads;
typedef void (*threads_work)(void *argument, int64_t first, int64_t last, int thread);

colibri_status threads_create(int count, threads **pool, colibri_message *message); /* 1 <= count <= COLIBRI_MAX_THREADS */
void threads_free(threads *pool);                                                    /* accepts NULL */
int threads_count(const threads *pool);   /* parts of a run */
int threads_at_work(const threads *pool); /* the same, but 1 in a forked child */
void threads_run(threads *pool, threads_work work, void *argument, int64_t n);

/* How many CPUs this process may use, 1 to COLIBRI_MAX_THREADS, and what says so. COLIBRI_CPUS in the environment speaks before
 * affinity and quota; what is no such number is refused, and *out then tells what the system says. */
colibri_status threads_usable_cpus(colibri_cpus *out, colibri_message *message);

/* CPUs, rounded down but at least 1, that the control groups named in `membership` (as /proc/self/cgroup) grant under `mount`; 0
 * = no limit. The tightest group from there to the root counts. Versions 1 and 2. */
int threads_cgroup_quota(const char *membership, const char *mount);

#endif
