#include "stages.h"

#include <string.h>

#include "aggregator.h"
#include "attention.h"
#include "dispatcher.h"
#include "experts.h"
#include "router.h"

#ifdef COLIBRI_WITHOUT_CAPTURE /* stages that cannot keep a tap: what benchmarks/measures/instructions.py compares with */
#define session_keeps(s, t, layer) false
#endif

static float *rows(const session *s, tap t, int64_t layer)
{
    return session_rows(s, t, layer);
}

/* Working memory that no tap shows. */
static void *scratch(const session *s, int64_t offset)
{
    return block_data(s->scratch) + offset;
}

/* The residual stream as it enters a layer. */
static const float *layer_input(const session *s, int64_t layer)
{
    return layer == 0 ? rows(s, TAP_EMBED, 0) : rows(s, TAP_OUTPUT, layer - 1);
}

/* ---- embed ----------------------------------------------------------------------------------------------------------------- */

bool stage_embed(session *s)
{
    const matrix *w = &s->model->weights.embed;
    float *x = rows(s, TAP_EMBED, 0);
    int64_t row_bytes = w->cols * (int64_t)colibri_dtype_size(w->dtype);
    const unsigned char *table = w->data;
    for (int64_t t = 0; t < s->tile_tokens; t++)
        s->machine.kernels->widen(x + t * w->cols, table + s->tile_ids[t] * row_bytes, w->dtype, w->cols);
    pass_rows(&s->machine, POINT_EMBED, x, 0, s->tile_tokens, w->cols);

    rotary_rows(&s->machine, &s->model->config, s->model->inv_freq, s->tile_first, s->tile_tokens, scratch(s, s->layout.cos),
                scratch(s, s->layout.sin));
    return !machine_stopped(&s->machine);
}

/* ---- attention ------------------------------------------------------------------------------------------------------------- */

bool stage_attention(session *s, int64_t l)
{
    const config *c = &s->model->config;
    const layer_weights *w = &s->model->weights.layers[l];
    int64_t kv_width = c->num_key_value_heads * c->head_dim, n = s->tile_tokens;
    const float *x = layer_input(s, l);
    float *norm = rows(s, TAP_ATTN_NORM, l), *out = rows(s, TAP_ATTN_OUT, l), *k = rows(s, TAP_ATTN_K, l),
          *v = rows(s, TAP_ATTN_V, l);
    attention_rows r = {
        .norm = norm,
        .q = rows(s, TAP_ATTN_Q, l),
        .k = k,
        .v = v,
        .all_k = k - s->tile_first * kv_width,
        .all_v = v - s->tile_first * kv_width,
        .context = scratch(s, s->layout.context),
        .out = out,
        .cos = scratch(s, s->layout.cos),
        .sin = scratch(s, s->layout.sin),
        .weights = scratch(s, s->layout.weights),
        .weights_head = n == 1 ? s->layout.max_tokens : 0,
        .weights_thread = n == 1 ? 0 : s->layout.max_tokens,
    };
    if (session_keeps(s, TAP_ATTN_WEIGHTS, l)) {
        r.weights = rows(s, TAP_ATTN_WEIGHTS, l);
        r.weights_head = s->layout.max_tokens * s->layout.max_tokens;
        r.weights_row = s->layout.max_tokens;
        r.weights_thread = 0;
    }
    machine_norm(&s->machine, norm, x, n, &w->attn_norm, c->rms_norm_eps);
    pass_rows(&s->machine, POINT_ATTN_NORM, norm, 0, n, c->hidden_size);
    attend(&s->machine, c, w, c->window[l], s->tile_first, n, &r);
    return !machine_stopped(&s->machine);
}

/* h = x + attn.out, of which the feed-forward half of a layer reads norm(h). */
static void normalised(session *s, int64_t l, float *input, point of_input)
{
    const config *c = &s->model->config;
    float *h = scratch(s, s->layout.residual);
    machine_add(&s->machine, h, layer_input(s, l), rows(s, TAP_ATTN_OUT, l), s->tile_tokens * c->hidden_size);
    pass_rows(&s->machine, POINT_MIDDLE, h, 0, s->tile_tokens, c->hidden_size);
    machine_norm(&s->machine, input, h, s->tile_tokens, &s->model->weights.layers[l].moe_norm, c->rms_norm_eps);
    pass_rows(&s->machine, of_input, input, 0, s->tile_tokens, c->hidden_size);
}

/* ---- mixture of experts ---------------------------------------------------------------------------------------------------- */

static router router_of(const session *s, colibri_gate_mode gates)
{
    const config *c = &s->model->config;
    return (router){.n_experts = c->num_experts,
                    .top_k = c->top_k,
                    .gates = gates,
                    .scores = emulated(s->machine.boundary, POINT_SCORES).storage,
                    .scratch = scratch(s, s->layout.router),
                    .select_by_logits =
                        c->gate_rule == COLIBRI_GATES_SOFTMAX_OF_CHOSEN || c->gate_rule == COLIBRI_GATES_RAW_LOGITS};
}

bool stage_router(session *s, int64_t l)
{
    router r = router_of(s, s->gates);
    float *input = rows(s, TAP_MOE_INPUT, l);
    normalised(s, l, input, POINT_MOE_INPUT);
    route(&s->machine, &r, input, s->tile_tokens, &s->model->weights.layers[l].router, rows(s, TAP_ROUTER_LOGITS, l),
          rows(s, TAP_SCORES, l), session_rows(s, TAP_EXPERT_IDS, l), rows(s, TAP_GATES, l));
    return !machine_stopped(&s->machine);
}

void route_tile_again(session *s, int64_t l, colibri_gate_mode gates, int64_t k, int64_t first, int64_t count, bool keep_ids)
{
    router r = router_of(s, gates);
    const kernels *kern = s->machine.kernels;
    const float *logits = rows(s, TAP_ROUTER_LOGITS, l);
    float *scores = rows(s, TAP_SCORES, l), *g = rows(s, TAP_GATES, l);
    int32_t *ids = session_rows(s, TAP_EXPERT_IDS, l);
    for (int64_t t = first; !keep_ids && t < first + count; t++)
        route_scores(kern, &r, logits + t * r.n_experts, scores + t * r.n_experts);
    if (!keep_ids)
        pass_rows(&s->machine, POINT_SCORES, scores, 0, s->tile_tokens, r.n_experts);
    for (int64_t t = first; t < first + count; t++)
        if (keep_ids)
            route_gates(kern, &r, logits + t * r.n_experts, ids + t * r.top_k, g + t * r.top_k, r.scratch);
        else
            route_choose(kern, &r, k, logits + t * r.n_experts, scores + t * r.n_experts, ids + t * r.top_k, g + t * r.top_k,
                         r.scratch);
    pass_rows(&s->machine, POINT_GATES, g, 0, s->tile_tokens, r.top_k);
}

/* The packed rows of a tile follow those of the tiles before it. */
static int64_t first_packed_row(const session *s)
{
    return s->tile_first * s->model->config.top_k;
}

/* Packed rows first .. stop - 1 of the tile, which no choice fills: zero, so that they do not depend on what was there. */
static void clear_packed(const session *s, int64_t l, int64_t first, int64_t stop)
{
    for (tap t = TAP_DISPATCH_INPUT; t <= TAP_DISPATCH_OUTPUT; t++) {
        int64_t row_bytes = layout_slot(&s->layout, &s->model->config, t, l)->row_bytes; /* 0: this tap has no rows here */
        memset((unsigned char *)session_rows(s, t, l) + first * row_bytes, 0, (size_t)((stop - first) * row_bytes));
    }
}

bool stage_dispatcher(session *s, int64_t l)
{
    const config *c = &s->model->config;
    dispatch d = {session_rows(s, TAP_DISPATCH_TOKENS, l), session_rows(s, TAP_DISPATCH_OFFSETS, l),
                  scratch(s, s->layout.places)};
    const int32_t *ids = session_rows(s, TAP_EXPERT_IDS, l);

    int64_t n_choices = s->tile_tokens * c->top_k;
    int64_t n_rows =
        dispatch_plan(&d, ids, s->tile_tokens, c->top_k, c->num_experts, s->tile_first, first_packed_row(s));
    dispatch_gather(&s->machine, rows(s, TAP_DISPATCH_INPUT, l), rows(s, TAP_MOE_INPUT, l), d.tokens, s->tile_first, n_rows,
                    c->hidden_size);
    if (n_rows < n_choices)
        clear_packed(s, l, n_rows, n_choices);
    return !machine_stopped(&s->machine);
}

/* A feed-forward buffer at row `row` of the tile: in the tape when it is kept, else the same scratch for every group of rows. */
static float *ffn_buffer(const session *s, tap t, int64_t l, int64_t row, int64_t scratch_offset)
{
    if (!session_keeps(s, t, l))
        return scratch(s, scratch_offset);
    return rows(s, t, l) + row * s->model->config.moe_intermediate_size;
}

/* Packed rows of the first n_experts experts run in groups of at most FFN_ROWS. The group that begins with row `first` ends with
 * an expert, if one ends in it, so that weights are not read twice. */
static int64_t group_end(const int64_t *offsets, int64_t n_experts, int64_t first)
{
    for (int64_t e = n_experts; e > 0 && offsets[e] > first; e--)
        if (offsets[e] - first <= FFN_ROWS)
            return offsets[e];
    return first + FFN_ROWS;
}

bool stage_experts(session *s, int64_t l, int64_t expert)
{
    const config *c = &s->model->config;
    const int64_t *offsets = session_rows(s, TAP_DISPATCH_OFFSETS, l);
    int64_t from = expert < 0 ? 0 : expert, to = expert < 0 ? c->num_experts : expert + 1, H = c->hidden_size;
    for (int64_t first = offsets[from], last; first < offsets[to]; first = last) {
        int64_t row = first - first_packed_row(s);
        ffn_rows r = {
            .input = rows(s, TAP_DISPATCH_INPUT, l) + row * H,
            .gate = ffn_buffer(s, TAP_DISPATCH_GATE, l, row, s->layout.gate),
            .up = ffn_buffer(s, TAP_DISPATCH_UP, l, row, s->layout.up),
            .hidden = ffn_buffer(s, TAP_DISPATCH_HIDDEN, l, row, s->layout.hidden),
            .output = rows(s, TAP_DISPATCH_OUTPUT, l) + row * H,
            .tokens = (const int32_t *)session_rows(s, TAP_DISPATCH_TOKENS, l) + row,
            .points = POINT_EXPERT_GATE,
        };
        last = group_end(offsets, to, first);
        ffn_run(&s->machine, s->model->weights.layers[l].experts, c->num_experts, offsets, first, last, &r);
    }
    return !machine_stopped(&s->machine);
}

/* One network that every token of the tile passes through. */
static void dense(session *s, const ffn_weights *w, point points, const float *input, float *output)
{
    int64_t H = s->model->config.hidden_size, offsets[2] = {0, s->tile_tokens};
    for (int64_t row = 0; row < s->tile_tokens; row += FFN_ROWS) {
        ffn_rows r = {
            .input = input + row * H,
            .gate = scratch(s, s->layout.gate),
            .up = scratch(s, s->layout.up),
            .hidden = scratch(s, s->layout.hidden),
            .output = output + row * H,
            .first_token = row,
            .points = points,
        };
        int64_t stop = row + FFN_ROWS < s->tile_tokens ? row + FFN_ROWS : s->tile_tokens;
        ffn_run(&s->machine, w, 1, offsets, row, stop, &r);
    }
}

static bool has_shared(const session *s)
{
    return s->model->config.shared_expert_intermediate_size > 0;
}

bool stage_shared(session *s, int64_t l)
{
    static const matrix no_bias;
    const layer_weights *w = &s->model->weights.layers[l];
    if (!has_shared(s))
        return true;
    const float *input = rows(s, TAP_MOE_INPUT, l);
    float *gate = rows(s, TAP_SHARED_GATE, l);
    dense(s, &w->shared, POINT_SHARED_INNER_GATE, input, rows(s, TAP_SHARED_OUTPUT, l));
    machine_linear(&s->machine, gate, input, s->tile_tokens, &w->shared_gate, &no_bias,
                   emulated(s->machine.boundary, POINT_SHARED_GATE_PRODUCT).accumulation);
    pass_rows(&s->machine, POINT_SHARED_GATE_PRODUCT, gate, 0, s->tile_tokens, 1);
    s->machine.kernels->sigmoid(gate, gate, s->tile_tokens);
    pass_rows(&s->machine, POINT_SHARED_GATE, gate, 0, s->tile_tokens, 1);
    return !machine_stopped(&s->machine);
}

bool stage_aggregator(session *s, int64_t l)
{
    const config *c = &s->model->config;
    float *routed = rows(s, TAP_MOE_ROUTED, l), *output = rows(s, TAP_MOE_OUTPUT, l); /* the same without a shared expert */
    aggregate_routed(&s->machine, routed, rows(s, TAP_DISPATCH_OUTPUT, l), rows(s, TAP_GATES, l), scratch(s, s->layout.places),
                     s->tile_tokens, c->top_k, c->hidden_size);
    pass_rows(&s->machine, POINT_MOE_ROUTED, routed, 0, s->tile_tokens, c->hidden_size);
    if (has_shared(s))
        aggregate_shared(&s->machine, output, routed, rows(s, TAP_SHARED_OUTPUT, l),
                         rows(s, TAP_SHARED_GATE, l), s->tile_tokens, c->hidden_size);
    pass_rows(&s->machine, POINT_MOE_OUTPUT, output, 0, s->tile_tokens, c->hidden_size);
    return !machine_stopped(&s->machine);
}

bool stage_mlp(session *s, int64_t l)
{
    float *input = rows(s, TAP_MLP_INPUT, l);
    normalised(s, l, input, POINT_MLP_INPUT);
    dense(s, &s->model->weights.layers[l].mlp, POINT_MLP_INNER_GATE, input, rows(s, TAP_MLP_OUTPUT, l));
    return !machine_stopped(&s->machine);
}

bool stage_residual(session *s, int64_t l)
{
    const config *c = &s->model->config;
    const float *y = rows(s, c->is_moe[l] ? TAP_MOE_OUTPUT : TAP_MLP_OUTPUT, l);
    float *output = rows(s, TAP_OUTPUT, l);
    machine_add(&s->machine, output, scratch(s, s->layout.residual), y, s->tile_tokens * c->hidden_size);
    pass_rows(&s->machine, POINT_OUTPUT, output, 0, s->tile_tokens, c->hidden_size);
    return !machine_stopped(&s->machine);
}

/* ---- logits ---------------------------------------------------------------------------------------------------------------- */

bool stage_norm(session *s)
{
    const config *c = &s->model->config;
    float *norm = rows(s, TAP_NORM, 0);
    machine_norm(&s->machine, norm, layer_input(s, c->num_hidden_layers), s->tile_tokens, &s->model->weights.norm,
                 c->rms_norm_eps);
    pass_rows(&s->machine, POINT_NORM, norm, 0, s->tile_tokens, c->hidden_size);
    return !machine_stopped(&s->machine);
}

bool stage_logits(session *s)
{
    static const matrix no_bias;
    const config *c = &s->model->config;
    const weights *w = &s->model->weights;
    const float *norm = rows(s, TAP_NORM, 0);
    bool all = session_keeps(s, TAP_LOGITS, 0), last = s->tile_first + s->tile_tokens == s->pass_start + s->pass_tokens;
    float *logits = all ? rows(s, TAP_LOGITS, 0) : (float *)(void *)block_data(s->next_logits);
    int64_t n = all ? s->tile_tokens : last ? 1 : 0, first = s->tile_tokens - n;
    machine_linear(&s->machine, logits, norm + first * c->hidden_size, n, &w->lm_head, &no_bias,
                   emulated(s->machine.boundary, POINT_LOGITS).accumulation);
    pass_rows(&s->machine, POINT_LOGITS, logits, first, n, w->lm_head.rows);
    return !machine_stopped(&s->machine);
}
