/* machine.h: what computes: the kernels in force, the threads, and the way to stop them.
 *
 * Work is split by a static partition and no result depends on it: every output is computed by one thread, as if alone.
 * While a pass runs, the caller's thread looks at the clock between blocks of work and asks the progress callback ten times a
 * second; when that says stop, every thread leaves its loop at its next block and all further work returns at once. */
#ifndef COLIBRI_CORE_MACHINE_H
#define COLIBRI_CORE_MACHINE_H

#include "../kernels/kernels.h"
#include "../utils/threads.h"

typedef struct machine {
    const kernels *kernels;
    threads *pool;
    float *room;           /* [threads, room_floats] packed rows and sums of matrix products of more than one row */
    int64_t room_floats;   /* of one thread: machine_room() */
    struct boundary *boundary; /* what happens to values once they are computed (boundary.h); NULL: nothing */
    int64_t serial_below;  /* work of fewer multiply-adds stays on the caller's thread: waking another costs more */

    colibri_progress progress; /* may be NULL */
    void *user;
    double done;           /* of the pass, as the callback is told; written by the caller's thread between stages */
    int64_t interval_ns;   /* between two calls of progress */
    int64_t next_ns;       /* when to call it next */
    int64_t unseen_work;   /* multiply-adds of the caller's thread since it last looked at the clock */
    int stopped;           /* atomic */
} machine;

/* Floats that a thread needs for products with matrices of up to `cols` columns. */
int64_t machine_room(int64_t cols);

colibri_status machine_init(machine *m, int n_threads, colibri_message *message);
void machine_free(machine *m);

/* A pass begins, or goes on when so much of it is done; asks once. */
void machine_begin(machine *m, colibri_progress progress, void *user, double done);
bool machine_stopped(const machine *m);

/* A thread reports `work` multiply-adds done; false when it should stop. */
bool machine_go_on(machine *m, int thread, int64_t work);

/* work(argument, first, last, thread) over a partition of 0 <= i < n that costs `total_work` multiply-adds in all. */
void machine_run(machine *m, threads_work work, void *argument, int64_t n, int64_t total_work);

/* y = x w^T + bias for n rows: out [n, w->rows] at out_stride, x [n, w->cols] contiguous. `sums`: the format that every partial
 * sum is kept in (rounding.h); with any but float32 by a slow loop. */
void machine_linear(machine *m, float *out, const float *x, int64_t n, const matrix *w, const matrix *bias, colibri_format sums);

/* The part of a linear map that one thread does, in blocks between which it may stop: outputs first <= r < last of n rows. */
bool machine_matmul(machine *m, int thread, float *out, int64_t out_stride, const float *x, int64_t n, const matrix *w,
                    const matrix *bias, int64_t first, int64_t last, colibri_format sums);

/* Rows of the next product when so many are left: even shares of at most MATMUL_ROWS. */
static inline int64_t machine_rows(int64_t left)
{
    int64_t products = (left + MATMUL_ROWS - 1) / MATMUL_ROWS;
    return (left + products - 1) / products;
}

/* The same in two steps, so that several products share the packed rows: n <= MATMUL_ROWS rows of x, which stay packed in the
 * thread's room until it packs others; and their product. */
const float *machine_pack(machine *m, int thread, const float *x, int64_t n, int64_t cols);
bool machine_product(machine *m, int thread, float *out, int64_t out_stride, const float *packed, int64_t n, const matrix *w,
                     const matrix *bias, int64_t first, int64_t last);

/* RMS norm of n rows of w->cols floats. */
void machine_norm(machine *m, float *out, const float *x, int64_t n, const matrix *w, float eps);
void machine_add(machine *m, float *out, const float *a, const float *b, int64_t n_elements);

#endif
