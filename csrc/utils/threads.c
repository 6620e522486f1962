/* threads.c: persistent workers that wait by spinning first and sleeping later.
 *
 * One run is one generation. The caller writes the task, raises `generation`, takes the first part itself, then every part that
 * its worker has not begun (the system may run something else on that CPU), and waits until `unfinished` is 0. A part belongs to
 * whoever moves its `claimed` from the generation before to this one; the others leave the task alone, for it may be over. A pass
 * of the engine runs hundreds of short tasks a token apart by microseconds, so both sides spin for a moment; a pool that nobody
 * uses sleeps on a condition variable and costs nothing. */
#include "threads.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "atomics.h"

enum { SPINS = 2000 }; /* pauses before sleeping: 30 to 100 microseconds, longer than the gap between two tasks of a pass */

typedef struct worker {
    threads *pool;
    pthread_t handle;
    int thread;  /* 1 .. count - 1: its scratch, and its part of a task */
    unsigned claimed; /* atomic: the last generation whose part somebody has taken */
} worker;

struct threads {
    int count;
    int forks; /* when the workers were created: a fork has none */
    worker *workers;

    pthread_mutex_t mutex;
    pthread_cond_t started, finished;
    unsigned generation; /* atomic, and so are the next three; it may wrap round */
    int unfinished; /* parts of this generation that are not done; the caller's own does not count */
    int asleep;     /* workers that wait on `started`, or are about to; changed under the mutex, as the next */
    int caller_asleep;

    threads_work work; /* the task; NULL tells the workers to leave. Written before generation, read after it */
    void *argument;
    int64_t n;
};

/* How many forks lie between this process and the one that began to count. Asking the system for the process at every run would
 * cost as much as the run itself. */
static int forks;
static pthread_once_t forks_counted = PTHREAD_ONCE_INIT;

static void count_fork(void)
{
    forks++;
}

static void count_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

/* Runs a part on the scratch of `thread`. */
static void run_part(const threads *pool, int part, int thread)
{
    int64_t share = pool->n / pool->count, rest = pool->n % pool->count; /* the first `rest` parts hold one more */
    int64_t first = part * share + (part < rest ? part : rest), last = first + share + (part < rest);
    if (first < last)
        pool->work(pool->argument, first, last, thread);
}

static bool claim(worker *w, unsigned generation)
{
    return atomic_load_acquire(&w->claimed) == generation - 1 && atomic_exchange_if(&w->claimed, generation - 1, generation);
}

static void wait_for_task(threads *pool, unsigned seen)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_acquire(&pool->generation) != seen)
            return;
        cpu_relax();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_add(&pool->asleep, 1); /* before the look at generation: who raises it sees a sleeper, or the sleeper sees it raised */
    while (atomic_load(&pool->generation) == seen)
        pthread_cond_wait(&pool->started, &pool->mutex);
    atomic_add(&pool->asleep, -1);
    pthread_mutex_unlock(&pool->mutex);
}

static void wait_for_workers(threads *pool)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_acquire(&pool->unfinished) == 0)
            return;
        cpu_relax();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_add(&pool->caller_asleep, 1);
    while (atomic_load(&pool->unfinished) != 0)
        pthread_cond_wait(&pool->finished, &pool->mutex);
    atomic_add(&pool->caller_asleep, -1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *serve(void *argument)
{
    worker *self = argument;
    threads *pool = self->pool;
    for (unsigned seen = 0;;) {
        wait_for_task(pool, seen);
        seen = atomic_load_acquire(&pool->generation);
        if (!claim(self, seen))
            continue;
        if (pool->work == NULL)
            return NULL;
        run_part(pool, self->thread, self->thread);
        if (atomic_add(&pool->unfinished, -1) == 0 && atomic_load(&pool->caller_asleep) != 0) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->finished);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void start_generation(threads *pool, threads_work work, void *argument, int64_t n)
{
    pool->work = work;
    pool->argument = argument;
    pool->n = n;
    atomic_store_release(&pool->unfinished, pool->count - 1);
    atomic_add(&pool->generation, 1);
    if (atomic_load(&pool->asleep) != 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->started);
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* Workers take no signals, so that Ctrl-C reaches the program's own threads; a fault of a worker's own stays its own. */
static int create_worker(worker *self)
{
    sigset_t none, before;
    sigfillset(&none);
    sigdelset(&none, SIGBUS);
    sigdelset(&none, SIGSEGV);
    sigdelset(&none, SIGFPE);
    sigdelset(&none, SIGILL);
    pthread_sigmask(SIG_SETMASK, &none, &before);
    int error = pthread_create(&self->handle, NULL, serve, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

colibri_status threads_create(int count, threads **pool_ret, colibri_message *message)
{
    *pool_ret = NULL;
    if (count < 1 || count > COLIBRI_MAX_THREADS)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "%d threads: choose 1 to %d", count, COLIBRI_MAX_THREADS);
    threads *pool = calloc(1, sizeof *pool);
    worker *workers = calloc((size_t)count, sizeof *workers);
    if (pool == NULL || workers == NULL) {
        free(pool);
        free(workers);
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a pool of %d threads", count);
    }
    pthread_once(&forks_counted, count_forks);
    pool->forks = forks;
    pool->workers = workers;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->started, NULL);
    pthread_cond_init(&pool->finished, NULL);
    int error = 0;
    for (pool->count = 1; pool->count < count && error == 0; pool->count += error == 0) {
        workers[pool->count] = (worker){.pool = pool, .thread = pool->count};
        error = create_worker(&workers[pool->count]);
    }
    if (error != 0) {
        int started = pool->count;
        threads_free(pool);
        return fail(message, COLIBRI_ERROR_MEMORY, "the system gave %d of %d threads: %s", started, count, strerror(error));
    }
    *pool_ret = pool;
    return COLIBRI_OK;
}

void threads_free(threads *pool)
{
    if (pool == NULL)
        return;
    if (pool->forks == forks) {
        if (pool->count > 1)
            start_generation(pool, NULL, NULL, 0);
        for (int thread = 1; thread < pool->count; thread++)
            pthread_join(pool->workers[thread].handle, NULL);
        pthread_cond_destroy(&pool->finished);
        pthread_cond_destroy(&pool->started);
        pthread_mutex_destroy(&pool->mutex);
    }
    free(pool->workers);
    free(pool);
}

int threads_count(const threads *pool)
{
    return pool->count;
}

int threads_at_work(const threads *pool)
{
    return pool->forks == forks ? pool->count : 1;
}

void threads_run(threads *pool, threads_work work, void *argument, int64_t n)
{
    if (pool->count == 1 || n <= 1) {
        if (n > 0)
            work(argument, 0, n, 0);
        return;
    }
    if (pool->forks != forks) { /* after fork: the same parts, one after the other */
        pool->work = work;
        pool->argument = argument;
        pool->n = n;
        for (int thread = 0; thread < pool->count; thread++)
            run_part(pool, thread, thread);
        return;
    }
    start_generation(pool, work, argument, n);
    run_part(pool, 0, 0);
    for (int part = 1; part < pool->count; part++)
        if (claim(&pool->workers[part], pool->generation)) {
            run_part(pool, part, 0);
            atomic_add(&pool->unfinished, -1);
        }
    wait_for_workers(pool);
}
