/* limits.c: what the machine itself can do, as a shared library for limits.py.
 *
 * read_stream: bytes per second when threads only read: the same ranges of the same mapped file that a token of the model reads,
 * in the same order, each matrix split by rows as the engine splits it. fma_rate: multiply-adds without memory. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "clock.h"
#include "fma_peak.h"

enum { MAX_THREADS = 256, MAX_STREAMS = 8, LINE = 64 };

typedef struct range {
    const unsigned char *data;
    int64_t rows, row_bytes;
} range;

typedef struct task {
    pthread_t handle;
    int number, threads;
    const range *ranges; /* NULL: multiply-adds */
    int64_t n_ranges;
    int streams;         /* places of its part that a thread reads in turn, a cache line each */
    int ahead;           /* bytes from a load to its prefetch; 0: none */
    int64_t rounds;
    atomic_int *waiting;
    double begin, end;
    float sink;
} task;

typedef uint64_t line_vector __attribute__((vector_size(32)));

static line_vector read_line(const unsigned char *p) {
    line_vector a, b;
    memcpy(&a, p, sizeof a);
    memcpy(&b, p + sizeof a, sizeof b);
    return a ^ b;
}

static uint64_t read_part(const unsigned char *data, int64_t n_bytes, int streams, int ahead) {
    const int64_t lines = n_bytes / LINE / streams; /* of one stream; what is left over is less than a stream of lines */
    line_vector sum[2] = {{0}, {0}};
    for (int64_t i = 0; i < lines; i++) {
        for (int s = 0; s < streams; s++) {
            const unsigned char *p = data + (s * lines + i) * LINE;
            if (ahead) __builtin_prefetch(p + ahead, 0, 3);
            sum[s & 1] ^= read_line(p);
        }
    }
    sum[0] ^= sum[1];
    return sum[0][0] ^ sum[0][1] ^ sum[0][2] ^ sum[0][3];
}

static void *run(void *argument) {
    task *t = argument;
    atomic_fetch_sub(t->waiting, 1);
    while (atomic_load(t->waiting) > 0) { } /* all begin together */
    t->begin = now();
    if (t->ranges == NULL) {
        t->sink = fma_chains(t->rounds, (float)(t->number + 1));
    } else {
        uint64_t sum = 0;
        for (int64_t i = 0; i < t->n_ranges; i++) {
            const range *r = &t->ranges[i];
            const int64_t first = r->rows * t->number / t->threads, last = r->rows * (t->number + 1) / t->threads;
            sum ^= read_part(r->data + first * r->row_bytes, (last - first) * r->row_bytes, t->streams, t->ahead);
        }
        t->sink = (float)(sum & 1);
    }
    t->end = now();
    return NULL;
}

/* Seconds from the first thread's begin to the last one's end; < 0: threads could not be made. */
static double run_all(task pattern) {
    if (pattern.threads < 1 || pattern.threads > MAX_THREADS) return -1.0;
    static task tasks[MAX_THREADS];
    atomic_int waiting;
    atomic_init(&waiting, pattern.threads);
    int made = 1;
    for (int i = 0; i < pattern.threads; i++) {
        tasks[i] = pattern;
        tasks[i].number = i;
        tasks[i].waiting = &waiting;
    }
    for (; made < pattern.threads; made++) {
        if (pthread_create(&tasks[made].handle, NULL, run, &tasks[made]) != 0) break;
    }
    if (made < pattern.threads) atomic_store(&waiting, 0); /* lets those go that wait */
    else run(&tasks[0]);
    for (int i = 1; i < made; i++) pthread_join(tasks[i].handle, NULL);
    if (made < pattern.threads) return -1.0;
    double begin = tasks[0].begin, end = tasks[0].end;
    for (int i = 1; i < made; i++) {
        if (tasks[i].begin < begin) begin = tasks[i].begin;
        if (tasks[i].end > end) end = tasks[i].end;
    }
    return end - begin;
}

double read_seconds(const range *ranges, int64_t n_ranges, int threads, int streams, int ahead) {
    if (streams < 1 || streams > MAX_STREAMS) return -1.0;
    const task pattern = {.threads = threads, .ranges = ranges, .n_ranges = n_ranges, .streams = streams, .ahead = ahead};
    return run_all(pattern);
}

/* Floating-point operations per second of all threads together. */
double fma_rate(int threads, int64_t rounds) {
    const task pattern = {.threads = threads, .rounds = rounds};
    const double seconds = run_all(pattern);
    return seconds > 0.0 ? fma_operations(rounds) * threads / seconds : -1.0;
}
