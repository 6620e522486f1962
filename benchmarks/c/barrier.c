/* barrier.c: what it costs to hand a task to the threads of the engine and to wait for them: tasks that do nothing.
 *
 *   barrier THREADS SECONDS
 *
 * One line for each batch: microseconds of a run, as the mean of RUNS of them. Batches are short, so that the median passes over
 * those in which the system took a thread away. */
#include <stdio.h>
#include <stdlib.h>

#include "../../csrc/utils/threads.h"
#include "clock.h"

enum { RUNS = 100 };

static void nothing(void *argument, int64_t first, int64_t last, int thread) {
    (void)argument;
    (void)first;
    (void)last;
    (void)thread;
}

int main(int argc, char **argv) {
    colibri_message message;
    threads *pool = NULL;
    if (argc != 3 || threads_create(atoi(argv[1]), &pool, &message) != COLIBRI_OK) {
        fprintf(stderr, "barrier THREADS SECONDS: %s\n", argc != 3 ? "two arguments" : message.text);
        return 1;
    }
    double begin, end = now();
    const double stop = end + atof(argv[2]);
    do {
        begin = end;
        for (int r = 0; r < RUNS; r++) threads_run(pool, nothing, NULL, threads_count(pool));
        end = now();
        printf("%.4f\n", (end - begin) / RUNS * 1e6);
    } while (end < stop);
    threads_free(pool);
    return 0;
}
