/* forward.c: the chapter to read first.
 *
 *     x = embed[ids]
 *     for each layer:
 *         h = x + o( attention( norm(x) ) )                       attention
 *         r = norm(h)
 *         logits = router r;  ids, gates = top-k                  router
 *         rows of r, packed expert by expert                      dispatcher
 *         y_e = down( silu(gate x) * (up x) )                     experts
 *         y = sum of gates * y_e (+ shared expert)                shared, aggregator
 *         x = h + y                                               residual
 *     logits = lm_head( norm(x) )
 *
 * A dense layer has one network for all tokens where the experts stand. */
#include "forward.h"

#include "stages.h"

static bool mixture(session *s, int64_t l)
{
    return stage_router(s, l) && stage_dispatcher(s, l) && stage_experts(s, l) && stage_shared(s, l) && stage_aggregator(s, l);
}

static bool layer(session *s, int64_t l)
{
    bool is_moe = s->model->config.is_moe[l];
    return stage_attention(s, l) && (is_moe ? mixture(s, l) : stage_mlp(s, l)) && stage_residual(s, l);
}

/* What the progress callback is told: the share of (token, layer) pairs behind us; the logits count as one layer more. */
static void set_done(session *s, int64_t layers)
{
    double before = (double)(s->tile_first - s->pass_start), n_layers = (double)s->model->config.num_hidden_layers + 1;
    s->machine.done = (before * n_layers + (double)(s->tile_tokens * layers)) / ((double)s->pass_tokens * n_layers);
}

static bool tile(session *s, const int32_t *ids)
{
    if (!stage_embed(s, ids))
        return false;
    for (int64_t l = 0; l < s->model->config.num_hidden_layers; l++) {
        set_done(s, l);
        if (!layer(s, l))
            return false;
    }
    set_done(s, s->model->config.num_hidden_layers);
    return stage_logits(s);
}

bool forward(session *s, const int32_t *ids, int64_t n)
{
    s->pass_start = s->n_tokens;
    s->pass_tokens = n;
    for (int64_t done = 0; done < n; done += s->layout.tile_tokens) {
        s->tile_first = s->pass_start + done;
        s->tile_tokens = n - done < s->layout.tile_tokens ? n - done : s->layout.tile_tokens;
        if (!tile(s, ids + done))
            return false;
    }
    return true;
}
