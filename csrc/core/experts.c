#include "experts.h"

typedef struct ffn_job {
    machine *machine;
    const ffn_weights *networks;
    int64_t n_networks;
    const int64_t *offsets;
    int64_t first, last;
    const ffn_rows *rows;
} ffn_job;

/* The rows of one network within the job, counted from the job's first row. */
typedef struct span {
    int64_t start, count;
} span;

static span span_of(const ffn_job *j, int64_t e)
{
    int64_t start = j->offsets[e] > j->first ? j->offsets[e] : j->first;
    int64_t stop = j->offsets[e + 1] < j->last ? j->offsets[e + 1] : j->last;
    return (span){start - j->first, stop > start ? stop - start : 0};
}

/* The job is cut into (row, output) cells, network by network, and a thread has the cells first <= i < last. Of a network that
 * owns the cells base .. base + count * n_outputs it takes the outputs that begin inside its range, each for all rows of the
 * network: so the threads finish together however the tokens fell, and every weight row is read by one thread. */
static int64_t output_from(int64_t cell, int64_t base, int64_t count, int64_t n_outputs)
{
    if (cell <= base)
        return 0;
    int64_t output = (cell - base + count - 1) / count;
    return output < n_outputs ? output : n_outputs;
}

/* hidden = silu(gate x) * (up x) */
static void hidden_work(void *argument, int64_t first, int64_t last, int thread)
{
    ffn_job *j = argument;
    static const matrix no_bias;
    int64_t base = 0;
    for (int64_t e = 0; e < j->n_networks && base < last; e++) {
        const ffn_weights *w = &j->networks[e];
        span s = span_of(j, e);
        if (s.count == 0)
            continue;
        int64_t width = w->gate.rows;
        int64_t from = output_from(first, base, s.count, width), to = output_from(last, base, s.count, width);
        base += s.count * width;
        if (from == to)
            continue;
        const float *x = j->rows->input + s.start * w->gate.cols;
        float *gate = j->rows->gate + s.start * width, *up = j->rows->up + s.start * width,
              *hidden = j->rows->hidden + s.start * width;
        if (!machine_matmul(j->machine, thread, gate, width, x, s.count, &w->gate, &no_bias, from, to) ||
            !machine_matmul(j->machine, thread, up, width, x, s.count, &w->up, &no_bias, from, to))
            return;
        for (int64_t r = 0; r < s.count; r++)
            j->machine->kernels->silu_mul(hidden + r * width + from, gate + r * width + from, up + r * width + from, to - from);
    }
}

/* output = down hidden */
static void output_work(void *argument, int64_t first, int64_t last, int thread)
{
    ffn_job *j = argument;
    static const matrix no_bias;
    int64_t base = 0;
    for (int64_t e = 0; e < j->n_networks && base < last; e++) {
        const ffn_weights *w = &j->networks[e];
        span s = span_of(j, e);
        if (s.count == 0)
            continue;
        int64_t from = output_from(first, base, s.count, w->down.rows), to = output_from(last, base, s.count, w->down.rows);
        base += s.count * w->down.rows;
        if (from < to && !machine_matmul(j->machine, thread, j->rows->output + s.start * w->down.rows, w->down.rows,
                                         j->rows->hidden + s.start * w->down.cols, s.count, &w->down, &no_bias, from, to))
            return;
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
