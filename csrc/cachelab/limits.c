/* limits.c: what the machine itself can do: bytes read in a second when threads only read, and operations without memory. */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "../include/colibri_cachelab.h"
#include "../utils/atomics.h"

enum { MAX_THREADS = 256, MAX_STREAMS = 8, LINE = 64 };

typedef struct task {
    pthread_t handle;
    int number, threads;
    const cachelab_stream *ranges; /* NULL: multiply-adds */
    int64_t n_ranges;
    int streams; /* places of its part that a thread reads in turn, a cache line each */
    int ahead;   /* bytes from a load to its prefetch; 0: none */
    const char *isa;
    int64_t rounds;
    int *waiting; /* atomic */
    double begin, end, operations;
    volatile float sink;
} task;

typedef uint64_t line_vector __attribute__((vector_size(32)));

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void read_line(line_vector *sum, const unsigned char *p)
{
    line_vector a, b;
    memcpy(&a, p, sizeof a);
    memcpy(&b, p + sizeof a, sizeof b);
    *sum ^= a ^ b;
}

static uint64_t read_part(const unsigned char *data, int64_t n_bytes, int streams, int ahead)
{
    int64_t lines = n_bytes / LINE / streams; /* of one stream; what is left over is less than a stream of lines */
    line_vector sum[2] = {{0}, {0}};
    for (int64_t i = 0; i < lines; i++)
        for (int s = 0; s < streams; s++) {
            const unsigned char *p = data + (s * lines + i) * LINE;
            if (ahead != 0)
                __builtin_prefetch(p + ahead, 0, 3);
            read_line(&sum[s & 1], p);
        }
    sum[0] ^= sum[1];
    return sum[0][0] ^ sum[0][1] ^ sum[0][2] ^ sum[0][3];
}

static void *run(void *argument)
{
    task *t = argument;
    atomic_add(t->waiting, -1);
    while (atomic_load(t->waiting) > 0) /* all begin together */
        cpu_relax();
    t->begin = now();
    if (t->ranges == NULL) {
        t->sink = cachelab_fma_chains(t->isa, t->rounds, (float)(t->number + 1), &t->operations);
    } else {
        uint64_t sum = 0;
        for (int64_t i = 0; i < t->n_ranges; i++) {
            const cachelab_stream *r = &t->ranges[i];
            int64_t first = r->rows * t->number / t->threads, last = r->rows * (t->number + 1) / t->threads;
            const unsigned char *data = r->data;
            sum ^= read_part(data + first * r->row_bytes, (last - first) * r->row_bytes, t->streams, t->ahead);
        }
        t->sink = (float)(sum & 1);
    }
    t->end = now();
    return NULL;
}

/* Seconds from the first thread's begin to the last one's end, and the operations of all; < 0: threads could not be made. */
static double run_all(task pattern, double *operations)
{
    task tasks[MAX_THREADS];
    int waiting = pattern.threads, made = 1;
    if (pattern.threads < 1 || pattern.threads > MAX_THREADS)
        return -1;
    for (int i = 0; i < pattern.threads; i++) {
        tasks[i] = pattern;
        tasks[i].number = i;
        tasks[i].waiting = &waiting;
    }
    while (made < pattern.threads && pthread_create(&tasks[made].handle, NULL, run, &tasks[made]) == 0)
        made++;
    if (made < pattern.threads)
        atomic_add(&waiting, -2 * MAX_THREADS); /* lets those go that wait */
    else
        run(&tasks[0]);
    for (int i = 1; i < made; i++)
        pthread_join(tasks[i].handle, NULL);
    if (made < pattern.threads)
        return -1;
    double begin = tasks[0].begin, end = tasks[0].end;
    *operations = 0;
    for (int i = 0; i < made; i++) {
        begin = tasks[i].begin < begin ? tasks[i].begin : begin;
        end = tasks[i].end > end ? tasks[i].end : end;
        *operations += tasks[i].operations;
    }
    return end - begin;
}

double cachelab_read_seconds(const cachelab_stream *ranges, int64_t n_ranges, int threads, int streams, int ahead)
{
    double none;
    if (streams < 1 || streams > MAX_STREAMS)
        return -1;
    return run_all((task){.threads = threads, .ranges = ranges, .n_ranges = n_ranges, .streams = streams, .ahead = ahead}, &none);
}

double cachelab_fma_rate(const char *isa, int threads, int64_t rounds)
{
    double operations = 0;
    double seconds = run_all((task){.threads = threads, .isa = isa, .rounds = rounds}, &operations);
    return seconds > 0 && operations > 0 ? operations / seconds : -1;
}
