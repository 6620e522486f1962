/* work.c: what the stages of a pass compute and touch, from a model's sizes and the experts really chosen. The header says what
 * counts as an operation and as a byte. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../include/colibri_cachelab.h"

enum { F32 = 4, ID = 4, PLACE = 8 }; /* bytes of a value, an expert id or token number, a row number */

typedef struct layer_work {
    bool is_moe, has_shared, has_qk_norm;
    int64_t window;   /* 0: all */
    int64_t n_biases; /* elements of the biases of q, k, v and o */
    int64_t attention, norm, router, shared, mlp; /* bytes of weights; norm: of the feed-forward half */
    int64_t *experts; /* [n_experts] the same, of each */
} layer_work;

struct cachelab_work {
    cachelab_sizes sizes;
    int64_t embed, norm, lm_head; /* bytes of weights */
    layer_work *layers;
    int64_t *experts; /* [n_layers, n_experts] */
};

cachelab_work *cachelab_work_create(const cachelab_sizes *sizes)
{
    cachelab_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->sizes = *sizes;
    w->layers = calloc((size_t)sizes->n_layers, sizeof *w->layers);
    w->experts = calloc((size_t)(sizes->n_layers * sizes->n_experts), sizeof *w->experts);
    if (w->layers == NULL || w->experts == NULL) {
        cachelab_work_free(w);
        return NULL;
    }
    for (int64_t l = 0; l < sizes->n_layers; l++)
        w->layers[l].experts = w->experts + l * sizes->n_experts;
    return w;
}

void cachelab_work_free(cachelab_work *w)
{
    if (w == NULL)
        return;
    free(w->layers);
    free(w->experts);
    free(w);
}

void cachelab_work_layer(cachelab_work *w, int64_t layer, bool is_moe, bool has_shared, int64_t window)
{
    w->layers[layer].is_moe = is_moe;
    w->layers[layer].has_shared = has_shared;
    w->layers[layer].window = window;
}

static bool begins(const char *text, const char *head)
{
    return strncmp(text, head, strlen(head)) == 0;
}

void cachelab_work_weight(cachelab_work *w, const char *name, int64_t n_elements, int64_t n_bytes)
{
    long long layer, expert;
    int at = 0;
    if (sscanf(name, "layers.%lld.%n", &layer, &at) != 1 || at == 0) {
        int64_t *outside = begins(name, "embed") ? &w->embed : begins(name, "lm_head") ? &w->lm_head : &w->norm;
        *outside += n_bytes;
        return;
    }
    if (layer < 0 || layer >= w->sizes.n_layers)
        return;
    const char *part = name + at, *dot = strrchr(part, '.');
    layer_work *l = &w->layers[layer];
    if (begins(part, "attn")) {
        l->attention += n_bytes;
        l->n_biases += dot != NULL && strcmp(dot, ".bias") == 0 ? n_elements : 0;
        l->has_qk_norm |= begins(part, "attn.q_norm");
    } else if (begins(part, "moe_norm")) {
        l->norm += n_bytes;
    } else if (begins(part, "moe.router")) {
        l->router += n_bytes;
    } else if (begins(part, "moe.shared")) {
        l->shared += n_bytes;
    } else if (begins(part, "mlp.")) {
        l->mlp += n_bytes;
    } else if (sscanf(part, "moe.experts.%lld.", &expert) == 1 && expert >= 0 && expert < w->sizes.n_experts) {
        l->experts[expert] += n_bytes;
    }
}

/* ---- stages ---------------------------------------------------------------------------------------------------------------- */

/* Of one row through gate, up, silu(gate) * up and down. */
static int64_t network(const cachelab_sizes *s, int64_t width)
{
    return 6 * s->hidden * width + 4 * width;
}

static cachelab_amount attention(const cachelab_sizes *s, const layer_work *l, int64_t start, int64_t n)
{
    int64_t width = s->heads * s->head_dim, kv_width = s->key_heads * s->head_dim, reach = 0;
    int64_t window = l->window > 0 ? l->window : start + n, first = start + 1 > window ? start + 1 - window : 0;
    for (int64_t t = start; t < start + n; t++)
        reach += t + 1 < window ? t + 1 : window;
    int64_t flops = 4 * n * s->hidden + 2 * n * s->hidden * (2 * width + 2 * kv_width) + n * l->n_biases;
    flops += (l->has_qk_norm ? 7 : 3) * n * (width + kv_width) + s->heads * reach * (4 * s->head_dim + 5);
    int64_t values = n * (3 * s->hidden + 2 * width + s->head_dim) + (start + n - first) * 2 * kv_width;
    return (cachelab_amount){(double)flops, (double)(l->attention + F32 * values)};
}

static cachelab_amount router(const cachelab_sizes *s, const layer_work *l, int64_t n)
{
    int64_t flops = n * s->hidden * (5 + 2 * s->n_experts) + 4 * n * s->n_experts;
    int64_t values = n * (4 * s->hidden + 2 * s->n_experts + s->top_k);
    return (cachelab_amount){(double)flops, (double)(l->router + l->norm + F32 * values + ID * n * s->top_k)};
}

static cachelab_amount dispatcher(const cachelab_sizes *s, int64_t n)
{
    int64_t places = n * s->top_k * (2 * ID + PLACE) + (s->n_experts + 1) * PLACE;
    return (cachelab_amount){0, (double)(places + F32 * n * (1 + s->top_k) * s->hidden)};
}

static cachelab_amount experts(const cachelab_sizes *s, const layer_work *l, const int32_t *ids, int64_t n)
{
    int64_t rows = 0, weights = 0;
    for (int64_t e = 0; e < s->n_experts; e++) {
        int64_t rows_before = rows;
        for (int64_t i = 0; i < n * s->top_k; i++)
            rows += ids[i] == e;
        weights += rows > rows_before ? l->experts[e] : 0;
    }
    int64_t values = rows * (2 * s->hidden + 3 * s->expert_width);
    return (cachelab_amount){(double)(rows * network(s, s->expert_width)), (double)(weights + F32 * values)};
}

static cachelab_amount shared(const cachelab_sizes *s, const layer_work *l, int64_t n)
{
    int64_t flops = n * (network(s, s->shared_width) + 2 * s->hidden + 3);
    return (cachelab_amount){(double)flops, (double)(l->shared + F32 * n * (2 * s->hidden + 3 * s->shared_width + 1))};
}

static cachelab_amount aggregator(const cachelab_sizes *s, const layer_work *l, int64_t n)
{
    int64_t terms = s->top_k + l->has_shared, values = n * ((terms + 1 + l->has_shared) * s->hidden + terms);
    return (cachelab_amount){(double)(2 * n * terms * s->hidden), (double)(F32 * values + PLACE * n * s->top_k)};
}

static cachelab_amount mlp(const cachelab_sizes *s, const layer_work *l, int64_t n)
{
    int64_t flops = n * (5 * s->hidden + network(s, s->dense_width));
    return (cachelab_amount){(double)flops, (double)(l->mlp + l->norm + F32 * n * (5 * s->hidden + 3 * s->dense_width))};
}

static void add(cachelab_amount *row, colibri_stage stage, cachelab_amount amount)
{
    row[stage].flops += amount.flops;
    row[stage].bytes += amount.bytes;
}

void cachelab_work_tile(const cachelab_work *w, int64_t start, int64_t n, bool last, const int32_t *const *ids,
                        cachelab_amount *out)
{
    const cachelab_sizes *s = &w->sizes;
    double size = (double)(n * s->hidden);
    for (int64_t i = 0; i < s->n_layers; i++) {
        const layer_work *l = &w->layers[i];
        cachelab_amount *row = out + i * CACHELAB_STAGES;
        add(row, COLIBRI_STAGE_ATTENTION, attention(s, l, start, n));
        add(row, COLIBRI_STAGE_RESIDUAL, (cachelab_amount){size, 3 * F32 * size});
        if (!l->is_moe) {
            add(row, COLIBRI_STAGE_MLP, mlp(s, l, n));
            continue;
        }
        add(row, COLIBRI_STAGE_ROUTER, router(s, l, n));
        add(row, COLIBRI_STAGE_DISPATCHER, dispatcher(s, n));
        add(row, COLIBRI_STAGE_EXPERT, experts(s, l, ids[i], n));
        add(row, COLIBRI_STAGE_AGGREGATOR, aggregator(s, l, n));
        if (l->has_shared)
            add(row, COLIBRI_STAGE_SHARED, shared(s, l, n));
    }
    cachelab_amount *outside = out + s->n_layers * CACHELAB_STAGES;
    int64_t stored = n * (w->embed / s->vocab); /* rows of the table as they are stored */
    add(outside, COLIBRI_STAGE_EMBED, (cachelab_amount){0, (double)(stored + F32 * n * (s->hidden + s->head_dim))});
    add(outside, COLIBRI_STAGE_NORM, (cachelab_amount){4 * size, (double)w->norm + 2 * F32 * size});
    if (last)
        add(outside, COLIBRI_STAGE_LOGITS,
            (cachelab_amount){(double)(2 * s->hidden * s->vocab), (double)(w->lm_head + F32 * (s->hidden + s->vocab))});
}
