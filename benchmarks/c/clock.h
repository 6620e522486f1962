/* clock.h: seconds for the measuring programs of this folder. */
#ifndef COLIBRI_BENCH_CLOCK_H
#define COLIBRI_BENCH_CLOCK_H

#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
