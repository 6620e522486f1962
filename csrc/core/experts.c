#include "experts.h"

typedef struct ffn_job {
    machine *machine;
    const ffn_weights *networks;
    int64_t n_networks;
    const int64_t *offsets;
    int64_t first, last;
    const ffn_rows *rows;
} ffn_job;

/* The job is cut into (row, output) cells, network by network, and a thread has the cells first <= i < last. Of a network that
 * owns the cells base .. base + count * n_outputs it takes the outputs that begin inside its range, each for all rows of the
 * network: so the threads finish together however the tokens fell, and every weight row is read by one thread. */
typedef struct share {
    int64_t e, base;      /* the network, and the first cell behind it */
    int64_t start, count; /* its rows, counted from the job's first row */
    int64_t from, to;     /* the outputs that are this thread's */
} share;

static int64_t output_from(int64_t cell, int64_t base, int64_t count, int64_t n_outputs)
{
    if (cell <= base)
        return 0;
    int64_t output = (cell - base + count - 1) / count;
    return output < n_outputs ? output : n_outputs;
}

/* The next network of which this thread has a share; begin with {.e = -1}. */
static bool next_share(share *s, const ffn_job *j, int64_t n_outputs, int64_t first, int64_t last)
{
    while (++s->e < j->n_networks && s->base < last) {
        int64_t start = j->offsets[s->e] > j->first ? j->offsets[s->e] : j->first;
        int64_t stop = j->offsets[s->e + 1] < j->last ? j->offsets[s->e + 1] : j->last;
        if (start >= stop)
            continue;
        s->start = start - j->first;
        s->count = stop - start;
        s->from = output_from(first, s->base, s->count, n_outputs);
        s->to = output_from(last, s->base, s->count, n_outputs);
        s->base += s->count * n_outputs;
        if (s->from < s->to)
            return true;
    }
    return false;
}

/* Columns from .. to of n rows behind row t, of the point that stands `k` behind the first of this network. */
static void pass_share(const ffn_job *j, int thread, const share *s, int k, float *values, int64_t width, int64_t t, int64_t n)
{
    const ffn_rows *r = j->rows;
    bool packed = r->tokens != NULL;
    pass_boundary(j->machine, thread, (point)(r->points + k),
                  (piece){values + t * width + s->from, n, s->to - s->from, width, r->first_token + t,
                          packed ? r->tokens + t : NULL, packed ? s->e : -1, s->from});
}

/* Outputs of n rows: x as they are, and packed. */
static bool product(const ffn_job *j, int thread, const share *s, int k, float *out, const matrix *w, const float *x,
                    const float *packed, int64_t n)
{
    static const matrix no_bias;
    colibri_format sums = emulated(j->machine->boundary, (point)(j->rows->points + k)).accumulation;
    return sums != COLIBRI_FLOAT32
               ? machine_matmul(j->machine, thread, out, w->rows, x, n, w, &no_bias, s->from, s->to, sums)
               : machine_product(j->machine, thread, out, w->rows, packed, n, w, &no_bias, s->from, s->to);
}

/* hidden = silu(gate x) * (up x), so many rows at a time that x is packed once and gate and up are still near. */
static void hidden_work(void *argument, int64_t first, int64_t last, int thread)
{
    ffn_job *j = argument;
    int64_t width = j->networks[0].gate.rows;
    for (share s = {.e = -1}; next_share(&s, j, width, first, last);) {
        const ffn_weights *w = &j->networks[s.e];
        for (int64_t t = s.start, stop = s.start + s.count, n; t < stop; t += n) {
            n = machine_rows(stop - t);
            float *gate = j->rows->gate + t * width, *up = j->rows->up + t * width, *hidden = j->rows->hidden + t * width;
            const float *x = j->rows->input + t * w->gate.cols, *packed = machine_pack(j->machine, thread, x, n, w->gate.cols);
            if (!product(j, thread, &s, 0, gate, &w->gate, x, packed, n) || !product(j, thread, &s, 1, up, &w->up, x, packed, n))
                return;
            pass_share(j, thread, &s, 0, j->rows->gate, width, t, n);
            pass_share(j, thread, &s, 1, j->rows->up, width, t, n);
            for (int64_t at = s.from; at < n * width; at += width)
                j->machine->kernels->silu_mul(hidden + at, gate + at, up + at, s.to - s.from);
            pass_share(j, thread, &s, 2, j->rows->hidden, width, t, n);
        }
    }
}

/* output = down hidden */
static void output_work(void *argument, int64_t first, int64_t last, int thread)
{
    ffn_job *j = argument;
    static const matrix no_bias;
    int64_t width = j->networks[0].down.cols, hidden_size = j->networks[0].down.rows;
    colibri_format sums = emulated(j->machine->boundary, (point)(j->rows->points + 3)).accumulation;
    for (share s = {.e = -1}; next_share(&s, j, hidden_size, first, last);) {
        if (!machine_matmul(j->machine, thread, j->rows->output + s.start * hidden_size, hidden_size,
                            j->rows->hidden + s.start * width, s.count, &j->networks[s.e].down, &no_bias, s.from, s.to,
                            sums))
            return;
        pass_share(j, thread, &s, 3, j->rows->output, hidden_size, s.start, s.count);
    }
}

void ffn_run(machine *m, const ffn_weights *networks, int64_t n_networks, const int64_t *offsets, int64_t first, int64_t last,
             const ffn_rows *rows)
{
    ffn_job job = {m, networks, n_networks, offsets, first, last, rows};
    int64_t n = last - first, width = networks[0].gate.rows, hidden_size = networks[0].down.rows;
    machine_run(m, hidden_work, &job, n * width, 2 * n * width * hidden_size);
    machine_run(m, output_work, &job, n * hidden_size, n * width * hidden_size);
}
