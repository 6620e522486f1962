#include "machine.h"

#include <time.h>

#include "../kernels/rounding.h"
#include "../utils/atomics.h"

#define PROGRESS_INTERVAL_NS 100000000 /* ten calls a second */

/* The caller's thread looks at the clock after this many multiply-adds: 0.1 ms with AVX2, a tenth of a second where FMA is
 * emulated. */
#define WORK_PER_LOOK ((int64_t)1 << 22)

/* Waking a sleeping thread costs some microseconds, which is about this many multiply-adds. */
#define SERIAL_BELOW ((int64_t)1 << 16)

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

colibri_status machine_init(machine *m, int n_threads, colibri_message *message)
{
    *m = (machine){.kernels = kernels_in_force(), .serial_below = SERIAL_BELOW, .interval_ns = PROGRESS_INTERVAL_NS};
    return threads_create(n_threads, &m->pool, message);
}

void machine_free(machine *m)
{
    threads_free(m->pool);
    m->pool = NULL;
}

bool machine_stopped(const machine *m)
{
    return atomic_load_acquire(&m->stopped) != 0;
}

static void ask(machine *m)
{
    if (m->progress != NULL && m->progress(m->user, m->done) != 0)
        atomic_store_release(&m->stopped, 1);
    m->next_ns = now_ns() + m->interval_ns;
}

void machine_begin(machine *m, colibri_progress progress, void *user, double done)
{
    m->progress = progress;
    m->user = user;
    m->done = done;
    m->unseen_work = 0;
    atomic_store_release(&m->stopped, 0);
    ask(m);
}

bool machine_go_on(machine *m, int thread, int64_t work)
{
    if (thread == 0 && m->progress != NULL && !machine_stopped(m)) {
        m->unseen_work += work;
        if (m->unseen_work >= WORK_PER_LOOK || m->interval_ns == 0) {
            m->unseen_work = 0;
            if (now_ns() >= m->next_ns)
                ask(m);
        }
    }
    return !machine_stopped(m);
}

void machine_run(machine *m, threads_work work, void *argument, int64_t n, int64_t total_work)
{
    if (n == 0 || machine_stopped(m))
        return;
    if (total_work < m->serial_below || threads_count(m->pool) == 1)
        work(argument, 0, n, 0);
    else
        threads_run(m->pool, work, argument, n);
}

/* ---- linear maps ----------------------------------------------------------------------------------------------------------- */

int64_t machine_room(int64_t cols)
{
    return matmul_scratch(cols) + packed_floats(MATMUL_ROWS, cols);
}

const float *machine_pack(machine *m, int thread, const float *x, int64_t n, int64_t cols)
{
    if (n == 1)
        return x;
    float *packed = m->room + thread * m->room_floats + matmul_scratch(cols);
    m->kernels->pack(packed, x, cols, n, cols);
    return packed;
}

bool machine_product(machine *m, int thread, float *out, int64_t out_stride, const float *packed, int64_t n, const matrix *w,
                     const matrix *bias, int64_t first, int64_t last)
{
    float *scratch = n == 1 ? NULL : m->room + thread * m->room_floats;
    int64_t groups = WORK_PER_LOOK / (n * w->cols * MATMUL_GROUP), outputs = (groups < 1 ? 1 : groups) * MATMUL_GROUP;
    for (int64_t r = first; r < last; r += outputs) {
        int64_t end = r + outputs < last ? r + outputs : last;
        m->kernels->matmul(out, out_stride, packed, n, w, bias, r, end, scratch);
        if (!machine_go_on(m, thread, n * (end - r) * w->cols))
            return false;
    }
    return true;
}

/* The same with rounded sums. An output costs as much as some 16 of the kernels'. */
static bool rounded_matmul(machine *m, int thread, float *out, int64_t out_stride, const float *x, int64_t n, const matrix *w,
                           const matrix *bias, int64_t first, int64_t last, colibri_format sums)
{
    for (int64_t t = 0; t < n; t++)
        for (int64_t r = first; r < last; r++) {
            rounded_products(out + t * out_stride, x + t * w->cols, w, bias, r, r + 1, sums);
            if (!machine_go_on(m, thread, 16 * w->cols))
                return false;
        }
    return true;
}

bool machine_matmul(machine *m, int thread, float *out, int64_t out_stride, const float *x, int64_t n, const matrix *w,
                    const matrix *bias, int64_t first, int64_t last, colibri_format sums)
{
    if (sums != COLIBRI_FLOAT32)
        return rounded_matmul(m, thread, out, out_stride, x, n, w, bias, first, last, sums);
    for (int64_t t = 0, rows; t < n; t += rows) {
        rows = machine_rows(n - t);
        const float *packed = machine_pack(m, thread, x + t * w->cols, rows, w->cols);
        if (!machine_product(m, thread, out + t * out_stride, out_stride, packed, rows, w, bias, first, last))
            return false;
    }
    return true;
}

typedef struct linear_job {
    machine *machine;
    float *out;
    const float *x;
    int64_t n;
    const matrix *w, *bias;
    colibri_format sums;
} linear_job;

static void linear_work(void *argument, int64_t first, int64_t last, int thread)
{
    linear_job *j = argument;
    machine_matmul(j->machine, thread, j->out, j->w->rows, j->x, j->n, j->w, j->bias, first, last,
                   j->sums);
}

void machine_linear(machine *m, float *out, const float *x, int64_t n, const matrix *w, const matrix *bias, colibri_format sums)
{
    linear_job job = {m, out, x, n, w, bias, sums};
    machine_run(m, linear_work, &job, w->rows, n * w->rows * w->cols);
}

/* ---- row by row ------------------------------------------------------------------------------------------------------------ */

typedef struct norm_job {
    machine *machine;
    float *out;
    const float *x;
    const matrix *w;
    float eps;
} norm_job;

static void norm_work(void *argument, int64_t first, int64_t last, int thread)
{
    norm_job *j = argument;
    (void)thread;
    for (int64_t t = first; t < last; t++)
        j->machine->kernels->rms_norm(j->out + t * j->w->cols, j->x + t * j->w->cols, j->w, j->w->cols, j->eps);
}

void machine_norm(machine *m, float *out, const float *x, int64_t n, const matrix *w, float eps)
{
    norm_job job = {m, out, x, w, eps};
    machine_run(m, norm_work, &job, n, n * w->cols);
}

typedef struct add_job {
    machine *machine;
    float *out;
    const float *a, *b;
} add_job;

static void add_work(void *argument, int64_t first, int64_t last, int thread)
{
    add_job *j = argument;
    (void)thread;
    j->machine->kernels->add(j->out + first, j->a + first, j->b + first, last - first);
}

void machine_add(machine *m, float *out, const float *a, const float *b, int64_t n_elements)
{
    add_job job = {m, out, a, b};
    machine_run(m, add_work, &job, n_elements, n_elements);
}
