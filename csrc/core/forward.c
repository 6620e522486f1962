/* forward.c: the chapter to read first.
 *
 *     x = embed[ids]
 *     for each layer:
 *         a = o( attention( norm(x) ) )                           attention
 *         h = x + a;  r = norm(h)
 *         logits = router r;  ids, gates = top-k                  router
 *         rows of r, packed expert by expert                      dispatcher
 *         y_e = down( silu(gate x) * (up x) )                     experts
 *         y = sum of gates * y_e (+ shared expert)                shared, aggregator
 *         x = h + y                                               residual
 *     logits = lm_head( norm(x) )                                 norm, logits
 *
 * A dense layer has one network for all tokens where the experts stand (mlp).
 *
 * There is one order of stages. A pass that runs through takes all experts as one stage, a stepped one (stepping.c) each of
 * them. */
#include "forward.h"

#include "stages.h"

static colibri_place at(colibri_stage stage, int64_t layer)
{
    return (colibri_place){stage, layer, -1};
}

colibri_place first_place(void)
{
    return at(COLIBRI_STAGE_EMBED, -1);
}

static bool exists(const config *c, colibri_place p)
{
    switch (p.stage) {
    case COLIBRI_STAGE_ROUTER:
    case COLIBRI_STAGE_DISPATCHER:
    case COLIBRI_STAGE_EXPERT:
    case COLIBRI_STAGE_AGGREGATOR: return c->is_moe[p.layer];
    case COLIBRI_STAGE_SHARED: return c->is_moe[p.layer] && c->shared_expert_intermediate_size > 0;
    case COLIBRI_STAGE_MLP: return !c->is_moe[p.layer];
    default: return true;
    }
}

colibri_place place_after(const session *s, colibri_place p)
{
    const config *c = &s->model->config;
    do {
        if (p.stage == COLIBRI_STAGE_RESIDUAL && p.layer + 1 < c->num_hidden_layers)
            p = at(COLIBRI_STAGE_ATTENTION, p.layer + 1);
        else
            p = at(p.stage + 1, p.stage == COLIBRI_STAGE_EMBED ? 0 : p.stage < COLIBRI_STAGE_RESIDUAL ? p.layer : -1);
    } while (!exists(c, p));
    return p;
}

double pass_done(const session *s, colibri_place p)
{
    int64_t n_layers = s->model->config.num_hidden_layers;
    int64_t behind = p.stage == COLIBRI_STAGE_EMBED ? 0 : p.stage >= COLIBRI_STAGE_NORM ? n_layers : p.layer;
    double before = (double)(s->tile_first - s->pass_start) * (double)(n_layers + 1);
    return (before + (double)(s->tile_tokens * behind)) / ((double)s->pass_tokens * (double)(n_layers + 1));
}

static bool compute(session *s, colibri_place p)
{
    switch (p.stage) {
    case COLIBRI_STAGE_EMBED: return stage_embed(s);
    case COLIBRI_STAGE_ATTENTION: return stage_attention(s, p.layer);
    case COLIBRI_STAGE_ROUTER: return stage_router(s, p.layer);
    case COLIBRI_STAGE_DISPATCHER: return stage_dispatcher(s, p.layer);
    case COLIBRI_STAGE_EXPERT: return stage_experts(s, p.layer, p.expert);
    case COLIBRI_STAGE_SHARED: return stage_shared(s, p.layer);
    case COLIBRI_STAGE_AGGREGATOR: return stage_aggregator(s, p.layer);
    case COLIBRI_STAGE_MLP: return stage_mlp(s, p.layer);
    case COLIBRI_STAGE_RESIDUAL: return stage_residual(s, p.layer);
    case COLIBRI_STAGE_NORM: return stage_norm(s);
    case COLIBRI_STAGE_LOGITS: return stage_logits(s);
    case COLIBRI_STAGE_NONE: break;
    }
    return true;
}

static bool compute_within_boundary(session *s, colibri_place p)
{
    if (s->machine.boundary == NULL)
        return compute(s, p);
    boundary_begin_stage(&s->boundary, p.layer, s->tile_first);
    return compute(s, p) && boundary_end_stage(&s->boundary, true);
}

bool run_stage(session *s, colibri_place p)
{
    if (p.stage == COLIBRI_STAGE_ATTENTION || p.stage == COLIBRI_STAGE_NORM) /* where a layer ends */
        s->machine.done = pass_done(s, p);
    if (s->observer == NULL)
        return compute_within_boundary(s, p);
    colibri_stage_event event = {p, s->tile_first, s->tile_tokens, true};
    s->observer(s->observer_user, &event);
    bool complete = compute_within_boundary(s, p);
    event.begins = false;
    s->observer(s->observer_user, &event);
    return complete;
}

bool forward(session *s, const int32_t *ids, int64_t n)
{
    s->pass_start = s->n_tokens;
    s->pass_tokens = n;
    boundary_begin_pass(&s->boundary);
    for (int64_t done = 0; done < n; done += s->layout.tile_tokens) {
        s->tile_ids = ids + done;
        s->tile_first = s->pass_start + done;
        s->tile_tokens = n - done < s->layout.tile_tokens ? n - done : s->layout.tile_tokens;
        for (colibri_place p = first_place(); p.stage != COLIBRI_STAGE_NONE; p = place_after(s, p))
            if (!run_stage(s, p))
                return false;
    }
    return true;
}
