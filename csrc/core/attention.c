#include "attention.h"

#include <math.h>
#include <string.h>

#include "../kernels/rounding.h"
#include "boundary.h"

/* ---- rotary table ---------------------------------------------------------------------------------------------------------- */

typedef struct rotary_job {
    const float *inv_freq;
    int64_t half, start;
    float factor;
    float *cos, *sin;
} rotary_job;

static void rotary_work(void *argument, int64_t first, int64_t last, int thread)
{
    rotary_job *j = argument;
    (void)thread;
    for (int64_t t = first; t < last; t++)
        rotary_row(j->cos + t * j->half, j->sin + t * j->half, j->inv_freq, j->half, j->start + t, j->factor);
}

void rotary_rows(machine *m, const config *c, const float *inv_freq, int64_t start, int64_t n, float *cos, float *sin)
{
    rotary_job job = {inv_freq, c->head_dim / 2, start, (float)c->rope.attention_factor, cos, sin};
    machine_run(m, rotary_work, &job, n, n * c->head_dim * 32); /* a sine and a cosine: some 64 operations */
}

/* ---- queries and keys: normalise, clip, rotate ----------------------------------------------------------------------------- */

typedef struct attend_job {
    machine *machine;
    const config *config;
    const layer_weights *weights;
    int64_t window, start, n;
    float scale; /* head_dim ^ -1/2 */
    const attention_rows *rows;
    colibri_format score_sums, context_sums; /* that their partial sums are kept in */
} attend_job;

static void normalise(const kernels *k, const config *c, float *row, int64_t n_heads, const matrix *w)
{
    if (c->qk_norm == QK_NORM_FULL)
        k->rms_norm(row, row, w, n_heads * c->head_dim, c->rms_norm_eps);
    if (c->qk_norm == QK_NORM_HEAD)
        for (int64_t h = 0; h < n_heads; h++)
            k->rms_norm(row + h * c->head_dim, row + h * c->head_dim, w, c->head_dim, c->rms_norm_eps);
}

static void rotate(const kernels *k, const config *c, float *row, int64_t n_heads, const float *cos, const float *sin)
{
    for (int64_t h = 0; h < n_heads; h++)
        k->rotate_half(row + h * c->head_dim, cos, sin, c->head_dim / 2);
}

static void prepare_work(void *argument, int64_t first, int64_t last, int thread)
{
    attend_job *j = argument;
    const config *c = j->config;
    const kernels *kern = j->machine->kernels;
    int64_t q_width = c->num_attention_heads * c->head_dim, kv_width = c->num_key_value_heads * c->head_dim;
    (void)thread;
    for (int64_t t = first; t < last; t++) {
        float *q = j->rows->q + t * q_width, *k = j->rows->k + t * kv_width, *v = j->rows->v + t * kv_width;
        normalise(kern, c, q, c->num_attention_heads, &j->weights->q_norm);
        normalise(kern, c, k, c->num_key_value_heads, &j->weights->k_norm);
        if (c->clip_qkv > 0) {
            kern->clamp(q, q_width, c->clip_qkv);
            kern->clamp(k, kv_width, c->clip_qkv);
            kern->clamp(v, kv_width, c->clip_qkv);
        }
        const float *cos = j->rows->cos + t * (c->head_dim / 2), *sin = j->rows->sin + t * (c->head_dim / 2);
        rotate(kern, c, q, c->num_attention_heads, cos, sin);
        rotate(kern, c, k, c->num_key_value_heads, cos, sin);
    }
}

/* ---- the weighted sum over visible keys ------------------------------------------------------------------------------------ */

/* The keys that a position sees: first .. position. */
static int64_t first_visible_key(int64_t position, int64_t window)
{
    return window > 0 && position >= window ? position - window + 1 : 0;
}

/* Scores or probabilities of the keys first .. first + n - 1 in one head of token t of the tile. */
static void pass_keys(const attend_job *j, int thread, point p, float *values, int64_t head, int64_t t, int64_t first, int64_t n)
{
    pass_boundary(j->machine, thread, p, (piece){values, 1, n, n, t, NULL, -1, head * (j->start + t + 1) + first});
}

/* Scores of n keys, and the weighted sum of n values (`go_on`: more of it), by the kernels or with sums in an emulated format. */
static void score(const attend_job *j, float *out, const float *q, const float *keys, int64_t stride, int64_t n)
{
    if (j->score_sums != COLIBRI_FLOAT32)
        rounded_scores(out, q, keys, stride, n, j->config->head_dim, j->scale, j->score_sums);
    else
        j->machine->kernels->scores(out, q, keys, stride, n, j->config->head_dim, j->scale);
}

static void mix(const attend_job *j, float *out, const float *weights, const float *values, int64_t stride, int64_t n, bool go_on)
{
    int64_t dim = j->config->head_dim;
    if (j->context_sums == COLIBRI_FLOAT32) {
        j->machine->kernels->weighted_sum(out, weights, values, stride, n, dim, go_on);
        return;
    }
    if (!go_on)
        memset(out, 0, (size_t)dim * sizeof *out);
    for (int64_t i = 0; i < n; i++)
        rounded_add_scaled(out, weights[i], values + i * stride, dim, j->context_sums);
}

/* Item i is query head i / n of token i % n: a thread gets whole heads, whose cost is alike. */
static void sum_work(void *argument, int64_t first, int64_t last, int thread)
{
    attend_job *j = argument;
    const attention_rows *r = j->rows;
    const kernels *kern = j->machine->kernels;
    int64_t heads = j->config->num_attention_heads, kv_heads = j->config->num_key_value_heads, dim = j->config->head_dim;
    int64_t stride = kv_heads * dim; /* from one key of a head to the next */
    for (int64_t i = first; i < last; i++) {
        int64_t head = i / j->n, t = i % j->n;
        int64_t first_key = first_visible_key(j->start + t, j->window), n_keys = j->start + t + 1 - first_key;
        int64_t key = first_key * stride + head / (heads / kv_heads) * dim, query = (t * heads + head) * dim;
        float *weights = r->weights + head * r->weights_head + t * r->weights_row + thread * r->weights_thread + first_key;

        score(j, weights, r->q + query, r->all_k + key, stride, n_keys);
        pass_keys(j, thread, POINT_ATTN_SCORES, weights, head, t, first_key, n_keys);
        kern->softmax(weights, weights, n_keys, first_key);
        pass_keys(j, thread, POINT_ATTN_WEIGHTS, weights, head, t, first_key, n_keys);
        mix(j, r->context + query, weights, r->all_v + key, stride, n_keys, false);
        if (!machine_go_on(j->machine, thread, 2 * n_keys * dim))
            return;
    }
}

/* A single token: item i is query head i. Memory sets the pace, so all heads of a thread pass over some keys, then over some
 * values, before the next ones are read. */
static void single_token_work(void *argument, int64_t first, int64_t last, int thread)
{
    enum { BLOCK = 64 }; /* of 64 to 128 floats each: half of a first cache for a key head */
    attend_job *j = argument;
    const attention_rows *r = j->rows;
    const kernels *kern = j->machine->kernels;
    int64_t kv_heads = j->config->num_key_value_heads, dim = j->config->head_dim, stride = kv_heads * dim;
    int64_t group = j->config->num_attention_heads / kv_heads, begin = first_visible_key(j->start, j->window), end = j->start + 1;
    for (int64_t s = begin, n; s < end; s += n) {
        n = end - s < BLOCK ? end - s : BLOCK;
        for (int64_t h = first; h < last; h++)
            score(j, r->weights + h * r->weights_head + s, r->q + h * dim, r->all_k + s * stride + h / group * dim, stride, n);
        if (!machine_go_on(j->machine, thread, n * (last - first) * dim))
            return;
    }
    for (int64_t h = first; h < last; h++) {
        float *weights = r->weights + h * r->weights_head + begin;
        pass_keys(j, thread, POINT_ATTN_SCORES, weights, h, 0, begin, end - begin);
        kern->softmax(weights, weights, end - begin, begin);
        pass_keys(j, thread, POINT_ATTN_WEIGHTS, weights, h, 0, begin, end - begin);
        if (!machine_go_on(j->machine, thread, end - begin))
            return;
    }
    for (int64_t s = begin, n; s < end; s += n) {
        n = end - s < BLOCK ? end - s : BLOCK;
        for (int64_t h = first; h < last; h++)
            mix(j, r->context + h * dim, r->weights + h * r->weights_head + s, r->all_v + s * stride + h / group * dim, stride, n,
                s > begin);
        if (!machine_go_on(j->machine, thread, n * (last - first) * dim))
            return;
    }
}

void attend(machine *m, const config *c, const layer_weights *w, int64_t window, int64_t start, int64_t n,
            const attention_rows *rows)
{
    attend_job job = {m, c, w, window, start, n, (float)(1 / sqrt((double)c->head_dim)), rows,
                      emulated(m->boundary, POINT_ATTN_SCORES).accumulation, emulated(m->boundary, POINT_CONTEXT).accumulation};
    int64_t width = c->num_attention_heads * c->head_dim, kv_width = c->num_key_value_heads * c->head_dim;

    machine_linear(m, rows->q, rows->norm, n, &w->q, &w->q_bias, emulated(m->boundary, POINT_Q_PRODUCT).accumulation);
    machine_linear(m, rows->k, rows->norm, n, &w->k, &w->k_bias, emulated(m->boundary, POINT_K_PRODUCT).accumulation);
    machine_linear(m, rows->v, rows->norm, n, &w->v, &w->v_bias, emulated(m->boundary, POINT_V_PRODUCT).accumulation);
    pass_rows(m, POINT_Q_PRODUCT, rows->q, 0, n, width);
    pass_rows(m, POINT_K_PRODUCT, rows->k, 0, n, kv_width);
    pass_rows(m, POINT_V_PRODUCT, rows->v, 0, n, kv_width);
    machine_run(m, prepare_work, &job, n, 8 * n * width);
    pass_rows(m, POINT_Q, rows->q, 0, n, width);
    pass_rows(m, POINT_K, rows->k, 0, n, kv_width);
    pass_rows(m, POINT_V, rows->v, 0, n, kv_width);
    machine_run(m, n == 1 ? single_token_work : sum_work, &job, c->num_attention_heads * n, 2 * n * (start + n) * width);
    pass_rows(m, POINT_CONTEXT, rows->context, 0, n, width);
    machine_linear(m, rows->out, rows->context, n, &w->o, &w->o_bias, emulated(m->boundary, POINT_ATTN_OUT).accumulation);
    pass_rows(m, POINT_ATTN_OUT, rows->out, 0, n, w->o.rows);
}
