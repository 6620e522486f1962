#include "router.h"

#include <string.h>

#include "../kernels/rounding.h"
#include "boundary.h"

/* One thread's scratch: a row of probabilities, then what topk needs. */
static size_t row_bytes(int64_t n_experts)
{
    return ((size_t)n_experts * sizeof(float) + 63) / 64 * 64;
}

size_t router_scratch(int64_t n_experts)
{
    return row_bytes(n_experts) + (topk_scratch(n_experts) + 63) / 64 * 64;
}

static bool by_softmax(const router *r)
{
    return r->gates == COLIBRI_GATES_SOFTMAX || r->gates == COLIBRI_GATES_SOFTMAX_RENORMALISED;
}

/* The gates of the slots that name an expert, from its logit or its probability p. */
static void gates_of(const kernels *k, const router *r, const float *p, const int32_t *ids, float *gates)
{
    int64_t n = 0;
    for (int64_t s = 0; s < r->top_k; s++) {
        int64_t e = ids[s];
        if (e >= 0 && e < r->n_experts)
            gates[n++] = p[e];
    }

    if (r->gates == COLIBRI_GATES_SOFTMAX_OF_CHOSEN)
        k->softmax(gates, gates, n, 0);
    if (r->gates == COLIBRI_GATES_SOFTMAX_RENORMALISED) {
        float sum = 0;
        for (int64_t s = 0; s < n; s++)
            sum += gates[s];
        for (int64_t s = 0; s < n; s++)
            gates[s] /= sum;
    }
    if (n < r->top_k) /* to their slots, from the last */
        for (int64_t s = r->top_k - 1; s >= 0; s--)
            gates[s] = ids[s] >= 0 && n > 0 ? gates[--n] : 0;
}

void route_scores(const kernels *k, const router *r, const float *logits, float *scores)
{
    if (r->select_by_logits)
        memcpy(scores, logits, (size_t)r->n_experts * sizeof(float));
    else
        k->softmax(scores, logits, r->n_experts, 0);
}

void route_choose(const kernels *k, const router *r, int64_t n_chosen, const float *logits, const float *scores, int32_t *ids,
                  float *gates, unsigned char *scratch)
{
    topk(ids, scores, r->n_experts, n_chosen, scratch + row_bytes(r->n_experts));
    for (int64_t s = n_chosen; s < r->top_k; s++)
        ids[s] = -1;

    if (by_softmax(r) && !r->select_by_logits) /* scores are the probabilities already */
        gates_of(k, r, scores, ids, gates);
    else
        route_gates(k, r, logits, ids, gates, scratch);
}

void route_gates(const kernels *k, const router *r, const float *logits, const int32_t *ids, float *gates,
                 unsigned char *scratch)
{
    float *p = (float *)(void *)scratch;
    if (by_softmax(r))
        k->softmax(p, logits, r->n_experts, 0);
    if (by_softmax(r) && !r->select_by_logits && rounds(r->scores)) /* p are the scores once more */
        round_to(p, r->n_experts, r->scores);
    gates_of(k, r, by_softmax(r) ? p : logits, ids, gates);
}

typedef struct route_job {
    machine *machine;
    const router *router;
    const float *logits;
    float *scores, *gates;
    int32_t *ids;
} route_job;

static void route_work(void *argument, int64_t first, int64_t last, int thread)
{
    route_job *j = argument;
    const router *r = j->router;
    const kernels *k = j->machine->kernels;
    int64_t n_experts = r->n_experts;
    unsigned char *scratch = r->scratch + (size_t)thread * router_scratch(r->n_experts);
    for (int64_t t = first; t < last; t++)
        route_scores(k, r, j->logits + t * n_experts, j->scores + t * n_experts);
    pass_boundary(j->machine, thread, POINT_SCORES,
                  (piece){j->scores + first * n_experts, last - first, n_experts, n_experts, first, NULL, -1, 0});
    for (int64_t t = first; t < last; t++)
        route_choose(k, r, r->top_k, j->logits + t * n_experts, j->scores + t * n_experts, j->ids + t * r->top_k,
                     j->gates + t * r->top_k, scratch);
}

void route(machine *m, const router *r, const float *x, int64_t n, const matrix *w, float *logits, float *scores, int32_t *ids,
           float *gates)
{
    static const matrix no_bias;
    machine_linear(m, logits, x, n, w, &no_bias, emulated(m->boundary, POINT_ROUTER_LOGITS).accumulation);
    pass_rows(m, POINT_ROUTER_LOGITS, logits, 0, n, r->n_experts);
    route_job job = {m, r, logits, scores, gates, ids};
    machine_run(m, route_work, &job, n, n * r->n_experts * 16); /* a softmax and a selection: some 16 operations an expert */
    pass_rows(m, POINT_GATES, gates, 0, n, r->top_k);
}
