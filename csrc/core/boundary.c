#include "boundary.h"

#include <stdio.h>
#include <string.h>

#include "../kernels/rounding.h"

/* ---- counts ---------------------------------------------------------------------------------------------------------------- */

static bool is_found(const colibri_watch_row *r)
{
    return r->token >= 0;
}

static bool is_before(const colibri_watch_row *r, int64_t token, int64_t expert, int64_t index)
{
    if (!is_found(r) || r->token != token)
        return is_found(r) && r->token < token;
    return r->expert != expert ? r->expert < expert : r->index < index;
}

/* The first value that is not finite may be this one. */
static void put_first(colibri_watch_row *r, int64_t token, int64_t expert, int64_t index, uint32_t bits)
{
    if (is_before(r, token, expert, index))
        return;
    r->token = token;
    r->expert = expert;
    r->index = index;
    r->bits = bits;
}

static void add(colibri_watch_row *to, const colibri_watch_row *from)
{
    to->n += from->n;
    to->n_nan += from->n_nan;
    to->n_signalling += from->n_signalling;
    to->n_inf += from->n_inf;
    to->n_negative_inf += from->n_negative_inf;
    to->n_subnormal += from->n_subnormal;
    if (from->largest > to->largest)
        to->largest = from->largest;
    if (is_found(from))
        put_first(to, from->token, from->expert, from->index, from->bits);
}

static void clear(colibri_watch_row *r, point p, int64_t layer)
{
    *r = (colibri_watch_row){.point = p, .layer = layer, .token = -1, .expert = -1, .index = -1};
}

/* ---- tables ---------------------------------------------------------------------------------------------------------------- */

enum { OF_LAYER = POINT_OUTPUT - POINT_ATTN_NORM + 1 };

static int64_t rows_of(const config *c)
{
    return POINT_COUNT - OF_LAYER + c->num_hidden_layers * OF_LAYER;
}

/* Row of a point in a table: embed, the layers, norm and logits. */
static int64_t row_of(const boundary *b, point p, int64_t layer)
{
    if (point_is_per_layer(p))
        return POINT_ATTN_NORM + layer * OF_LAYER + (p - POINT_ATTN_NORM);
    return p < POINT_ATTN_NORM ? p : b->n_rows - (POINT_COUNT - p);
}

static void clear_table(const boundary *b, colibri_watch_row *table)
{
    for (point p = 0; p < POINT_COUNT; p++)
        for (int64_t l = 0; l < (point_is_per_layer(p) ? b->config->num_hidden_layers : 1); l++)
            clear(&table[row_of(b, p, l)], p, point_is_per_layer(p) ? l : -1);
}

static bool has_row(const config *c, const colibri_watch_row *r)
{
    return point_exists(c, (point)r->point, r->layer < 0 ? 0 : r->layer);
}

static void add_table(const boundary *b, colibri_watch_row *to, const colibri_watch_row *from)
{
    for (int64_t i = 0; i < b->n_rows; i++)
        add(&to[i], &from[i]);
}

int64_t boundary_table_bytes(const config *c)
{
    return rows_of(c) * (int64_t)sizeof(colibri_watch_row);
}

static int64_t points_of(const config *c)
{
    int64_t n = 0;
    for (point p = 0; p < POINT_COUNT; p++)
        for (int64_t l = 0; l < (point_is_per_layer(p) ? c->num_hidden_layers : 1); l++)
            n += point_exists(c, p, l);
    return n;
}

int64_t boundary_pass_bytes(const config *c)
{
    return points_of(c) * (int64_t)sizeof(pass_counts);
}

int64_t boundary_thread_bytes(void)
{
    return ((int64_t)sizeof(thread_counts) + 63) / 64 * 64; /* cache lines of its own */
}

static thread_counts *of_thread(const boundary *b, int thread)
{
    return (thread_counts *)(void *)(b->threads + thread * boundary_thread_bytes());
}

bool boundary_is_on(const boundary *b)
{
    return b->watch != COLIBRI_WATCH_OFF || b->emulation != NULL;
}

void boundary_init(boundary *b, const config *c, int n_threads, void *tables, void *passes, void *threads)
{
    b->config = c;
    b->n_threads = n_threads;
    b->n_rows = rows_of(c);
    b->n_points = points_of(c);
    b->threads = threads;
    b->pass = tables;
    b->closed = b->pass + b->n_rows;
    b->spare = b->closed + b->n_rows;
    b->passes = passes;
    clear_table(b, b->closed);
}

/* ---- values ---------------------------------------------------------------------------------------------------------------- */

static void watch(const boundary *b, colibri_watch_row *r, const piece *x)
{
    bool contiguous = x->n_rows == 1 || x->stride == x->n_cols;
    int64_t n_runs = contiguous ? 1 : x->n_rows, length = contiguous ? x->n_rows * x->n_cols : x->n_cols;
    for (int64_t i = 0; i < n_runs; i++) {
        sentinel s = sentinel_scan(x->values + i * x->stride, COLIBRI_F32, length);
        float largest;
        memcpy(&largest, &s.largest, sizeof largest);
        r->n += length;
        r->n_nan += s.n_nan;
        r->n_signalling += s.n_signalling;
        r->n_inf += s.n_inf;
        r->n_negative_inf += s.n_negative_inf;
        r->n_subnormal += s.n_subnormal;
        if (largest > r->largest)
            r->largest = largest;
        if (s.first < 0)
            continue;
        int64_t row = i + s.first / x->n_cols;
        bool quiet = (s.first_bits & 0x7fffffff) > 0x7f800000 && (s.first_bits & 0x00400000) != 0;
        put_first(r, x->tokens != NULL ? x->tokens[row] : b->first_token + x->first + row, x->expert,
                  x->index + s.first % x->n_cols, quiet ? 0x7fc00000 : s.first_bits);
    }
}

#ifdef COLIBRI_FAULTS /* an arithmetic that fails at one place: tests/faults builds it, nothing else may */
static struct {
    int64_t point, layer, expert, token, first, last; /* values first .. last - 1 of that token there; layer and expert -1: none */
    uint32_t bits;
} fault = {.point = -1};

__attribute__((visibility("default"))) void colibri_fault_set(const int64_t place[6], uint32_t bits)
{
    memcpy(&fault, place, 6 * sizeof *place);
    fault.bits = bits;
}

static void fail_here(const boundary *b, point p, const piece *x)
{
    if ((int64_t)p != fault.point || b->layer != fault.layer || x->expert != fault.expert)
        return;
    for (int64_t r = 0; r < x->n_rows; r++)
        for (int64_t c = 0; c < x->n_cols; c++)
            if ((x->tokens != NULL ? x->tokens[r] : b->first_token + x->first + r) == fault.token &&
                x->index + c >= fault.first && x->index + c < fault.last)
                memcpy(x->values + r * x->stride + c, &fault.bits, sizeof fault.bits);
}
#endif

void boundary_piece(const boundary *b, int thread, point p, const piece *x)
{
#ifdef COLIBRI_FAULTS
    fail_here(b, p, x);
#endif
    colibri_rounding storage = emulated(b, p).storage;
    for (int64_t i = 0; rounds(storage) && i < x->n_rows; i++)
        round_to(x->values + i * x->stride, x->n_cols, storage);
    if (b->watch == COLIBRI_WATCH_OFF)
        return;
    thread_counts *counts = of_thread(b, thread);
    if ((counts->touched >> p & 1) == 0) {
        counts->touched |= (uint64_t)1 << p;
        clear(&counts->rows[p], p, point_is_per_layer(p) ? b->layer : -1);
    }
    watch(b, &counts->rows[p], x);
}

typedef struct rows_job {
    const boundary *boundary;
    point point;
    piece all;
} rows_job;

/* A single row is cut into columns. */
static void rows_work(void *argument, int64_t first, int64_t last, int thread)
{
    rows_job *j = argument;
    piece x = j->all;
    x.values += first * (x.n_rows == 1 ? 1 : x.stride);
    if (x.n_rows == 1) {
        x.n_cols = last - first;
        x.index = first;
    } else {
        x.n_rows = last - first;
        x.first += first;
    }
    boundary_piece(j->boundary, thread, j->point, &x);
}

void pass_rows(machine *m, point p, float *values, int64_t first, int64_t n_rows, int64_t width)
{
    if (m->boundary == NULL)
        return;
    rows_job job = {m->boundary, p,
                    {.values = values, .n_rows = n_rows, .n_cols = width, .stride = width, .first = first, .expert = -1}};
    machine_run(m, rows_work, &job, n_rows == 1 ? width : n_rows, 8 * n_rows * width); /* some 8 operations a value, of integers */
}

/* ---- stages ---------------------------------------------------------------------------------------------------------------- */

void boundary_begin_pass(boundary *b)
{
    if (b->watch != COLIBRI_WATCH_OFF)
        clear_table(b, b->pass);
}

void boundary_begin_stage(boundary *b, int64_t layer, int64_t first_token)
{
    b->layer = layer;
    b->first_token = first_token;
    b->found = NULL;
    for (int t = 0; b->watch != COLIBRI_WATCH_OFF && t < b->n_threads; t++)
        of_thread(b, t)->touched = 0;
}

bool boundary_end_stage(boundary *b, bool may_stop)
{
    if (b->watch == COLIBRI_WATCH_OFF)
        return true;
    thread_counts *all = of_thread(b, 0); /* what the others counted is added to the first */
    for (int t = 1; t < b->n_threads; t++) {
        const thread_counts *more = of_thread(b, t);
        for (point p = 0; more->touched != 0 && p < POINT_COUNT; p++)
            if ((more->touched >> p & 1) != 0) {
                if ((all->touched >> p & 1) != 0)
                    add(&all->rows[p], &more->rows[p]);
                else
                    all->rows[p] = more->rows[p];
                all->touched |= (uint64_t)1 << p;
            }
    }
    for (point p = 0; may_stop && b->watch == COLIBRI_WATCH_STOP && p < POINT_COUNT; p++)
        if ((all->touched >> p & 1) != 0 && is_found(&all->rows[p])) {
            b->found = &all->rows[p];
            return false;
        }
    for (point p = 0; p < POINT_COUNT; p++)
        if ((all->touched >> p & 1) != 0)
            add(&b->pass[row_of(b, p, b->layer)], &all->rows[p]);
    return true;
}

colibri_status boundary_fail(const boundary *b, const char *tail, colibri_message *message)
{
    const colibri_watch_row *r = b->found;
    char path[TAP_PATH_SIZE], where[64] = "";
    point_path((point)r->point, r->layer, r->expert, path);
    const char *value = (r->bits & 0x7fffffff) == 0x7f800000 ? (r->bits >> 31 != 0 ? "-Inf" : "+Inf")
                        : (r->bits & 0x00400000) != 0        ? "NaN"
                                                             : "a signalling NaN";
    if (r->point == POINT_ATTN_SCORES || r->point == POINT_ATTN_WEIGHTS)
        snprintf(where, sizeof where, " (head %lld, key %lld)", (long long)(r->index / (r->token + 1)),
                 (long long)(r->index % (r->token + 1)));
    return fail(message, COLIBRI_ERROR_NONFINITE, "\"%s\" is not finite: %s at token %lld, index %lld%s; %s", path, value,
                (long long)r->token, (long long)r->index, where, tail);
}

void boundary_forget(boundary *b, point first, point last, int64_t layer)
{
    if (b->watch != COLIBRI_WATCH_OFF)
        for (point p = first; p <= last; p++)
            clear(&b->pass[row_of(b, p, layer)], p, layer);
}

/* ---- passes ---------------------------------------------------------------------------------------------------------------- */

void boundary_close_pass(boundary *b, int64_t pass)
{
    pass_counts *out = b->passes + pass * b->n_points;
    for (int64_t i = 0; b->watch != COLIBRI_WATCH_OFF && i < b->n_rows; i++) {
        const colibri_watch_row *r = &b->pass[i];
        if (has_row(b->config, r))
            *out++ = (pass_counts){r->n, r->n_nan, r->n_signalling, r->n_inf, r->n_negative_inf, r->n_subnormal, r->largest};
    }
}

void boundary_add_pass(boundary *b)
{
    if (b->watch != COLIBRI_WATCH_OFF)
        add_table(b, b->closed, b->pass);
}

/* The sum of the first passes, all of which `from` has closed, into the spare table. */
static void sum(boundary *b, const boundary *from, int64_t n_passes, int64_t n_tokens)
{
    const pass_counts *r = b->passes;
    clear_table(b, b->spare);
    for (int64_t pass = 0; pass < n_passes; pass++)
        for (int64_t i = 0; i < b->n_rows; i++)
            if (has_row(b->config, &b->spare[i])) {
                add(&b->spare[i], &(colibri_watch_row){.n = r->n, .n_nan = r->n_nan, .n_signalling = r->n_signalling,
                                                       .n_inf = r->n_inf, .n_negative_inf = r->n_negative_inf,
                                                       .n_subnormal = r->n_subnormal, .largest = r->largest, .token = -1});
                r++;
            }
    for (int64_t i = 0; i < b->n_rows; i++) {
        const colibri_watch_row *all = &from->closed[i];
        if (is_found(all) && all->token < n_tokens)
            put_first(&b->spare[i], all->token, all->expert, all->index, all->bits);
    }
}

void boundary_sum(boundary *b, int64_t n_passes, int64_t n_tokens)
{
    if (b->watch != COLIBRI_WATCH_OFF)
        sum(b, b, n_passes, n_tokens);
}

void boundary_use_sum(boundary *b)
{
    colibri_watch_row *old = b->closed;
    b->closed = b->spare;
    b->spare = old;
}

void boundary_copy(boundary *b, const boundary *from, int64_t n_passes, int64_t n_tokens)
{
    if (b->watch == COLIBRI_WATCH_OFF)
        return;
    memcpy(b->passes, from->passes, (size_t)(n_passes * b->n_points) * sizeof *b->passes);
    sum(b, from, n_passes, n_tokens);
    boundary_use_sum(b);
}

size_t boundary_table(const boundary *b, colibri_watch_row *out, size_t capacity)
{
    size_t n = 0;
    for (int64_t i = 0; b->watch != COLIBRI_WATCH_OFF && i < b->n_rows; i++) {
        const colibri_watch_row *r = &b->closed[i];
        if (!has_row(b->config, r))
            continue;
        if (n < capacity)
            out[n] = *r;
        n++;
    }
    return n;
}
