/* barrier.c: what it costs to hand a task to the threads of the engine and to wait for them: tasks that do nothing.
 *
 *   barrier THREADS BATCHES RUNS
 *
 * One line for each batch: microseconds of a run, as the mean of RUNS of them. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../../csrc/utils/threads.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void nothing(void *argument, int64_t first, int64_t last, int thread) {
    (void)argument;
    (void)first;
    (void)last;
    (void)thread;
}

int main(int argc, char **argv) {
    colibri_message message;
    threads *pool = NULL;
    if (argc != 4 || threads_create(atoi(argv[1]), &pool, &message) != COLIBRI_OK) {
        fprintf(stderr, "barrier THREADS BATCHES RUNS: %s\n", argc != 4 ? "three arguments" : message.text);
        return 1;
    }
    const long batches = atol(argv[2]), runs = atol(argv[3]);
    for (long b = 0; b < batches; b++) {
        const double begin = now();
        for (long r = 0; r < runs; r++) threads_run(pool, nothing, NULL, threads_count(pool));
        printf("%.4f\n", (now() - begin) / (double)runs * 1e6);
    }
    threads_free(pool);
    return 0;
}
