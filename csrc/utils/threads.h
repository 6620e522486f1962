/* threads.h: a small pool of persistent workers with a static partition.
 *
 * run(pool, work, argument, n) splits 0 <= i < n into one contiguous range per thread and calls work(argument, first, last, thread) on each;
 * the caller's thread is thread 0 and takes part. It returns when all are done. The partition depends only on n and the thread count;
 * results may not depend on it at all. A pool is used by one caller at a time. */
#ifndef COLIBRI_THREADS_H
#define COLIBRI_THREADS_H

#include "status.h"

typedef struct threads threads;
typedef void (*threads_work)(void *argument, int64_t first, int64_t last, int thread);

colibri_status threads_create(int count, threads **pool, colibri_message *message); /* 1 <= count <= COLIBRI_MAX_THREADS */
void threads_free(threads *pool);                                                    /* accepts NULL */
int threads_count(const threads *pool);
void threads_run(threads *pool, threads_work work, void *argument, int64_t n);
int threads_default_count(void); /* from affinity and cgroup quota, at least 1 */

#endif
