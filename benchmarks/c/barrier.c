/* barrier.c: what it costs to hand a task to the threads of the engine and to wait for them.
 *
 *   barrier THREADS SECONDS
 *
 * Each part of a task is some microseconds of arithmetic, long enough that every thread begins its own part (the caller does those
 * that nobody has begun). One line for each batch: microseconds of a run, less those of one part done directly in the same batch,
 * as the mean of RUNS of them. Batches are short, so that the median passes over
 * those in which the system took a thread away. */
#include <stdio.h>
#include <stdlib.h>

#include "../../csrc/utils/threads.h"
#include "clock.h"

enum { RUNS = 100, STEPS = 3000 }; /* a step takes 3 to 5 cycles: 3 to 5 microseconds together */

static void compute(void *argument, int64_t first, int64_t last, int thread) {
    (void)argument;
    (void)thread;
    for (volatile unsigned x = 1; first < last; first++)
        for (int i = 0; i < STEPS; i++) x = x * 5 + 1;
}

int main(int argc, char **argv) {
    colibri_message message;
    threads *pool = NULL;
    if (argc != 3 || threads_create(atoi(argv[1]), &pool, &message) != COLIBRI_OK) {
        fprintf(stderr, "barrier THREADS SECONDS: %s\n", argc != 3 ? "two arguments" : message.text);
        return 1;
    }
    const double stop = now() + atof(argv[2]);
    double end;
    do {
        double begin = now();
        for (int r = 0; r < RUNS; r++) compute(NULL, 0, 1, 0);
        double middle = now();
        for (int r = 0; r < RUNS; r++) threads_run(pool, compute, NULL, threads_count(pool));
        end = now();
        printf("%.4f\n", ((end - middle) - (middle - begin)) / RUNS * 1e6);
    } while (end < stop);
    threads_free(pool);
    return 0;
}
