#include "layout.h"

#include "../utils/memory.h"
#include "boundary.h"
#include "machine.h"
#include "router.h"

static int64_t rows_for(const config *c, tap t, int64_t n_tokens, int64_t n_passes)
{
    switch (tap_rows_of(t)) {
    case ROWS_PACKED: return n_tokens * c->top_k;
    case ROWS_PASSES: return n_passes;
    case ROWS_HEADS: return n_tokens * c->num_attention_heads;
    default: return n_tokens;
    }
}

static int64_t row_bytes_of(const config *c, tap t, int64_t max_tokens)
{
    return tap_rows_of(t) == ROWS_HEADS ? max_tokens * (int64_t)sizeof(float) : tap_row_bytes(c, t);
}

static bool keeps_packed_rows(const config *c, const bool *kept)
{
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        if (kept[l * TAP_COUNT + TAP_DISPATCH_TOKENS])
            return true;
    return false;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The tape: layer by layer, in the order in which a pass fills it. */
static void plan_tape(const config *c, const bool *kept, layout *out)
{
    plan tape = {0}, kv = {0};
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        for (int t = 0; t < TAP_COUNT; t++) {
            slot *s = &out->slots[l * TAP_COUNT + t];
            *s = (slot){0};
            if (!kept[l * TAP_COUNT + t])
                continue;
            s->kept = true;
            s->row_bytes = row_bytes_of(c, (tap)t, out->max_tokens);
            s->n_rows = rows_for(c, (tap)t, out->max_tokens, out->max_tokens);
            s->offset = plan_take(&tape, s->n_rows, s->row_bytes);
            if (t == TAP_ATTN_K || t == TAP_ATTN_V)
                plan_take(&kv, s->n_rows, s->row_bytes);
        }
    out->tape_bytes = tape.n_bytes;
    out->kv_bytes = kv.n_bytes;
}

/* Taps that this layer does not keep share one place in scratch with all other layers; some have a place of another kind. */
static bool has_tile_rows(const config *c, tap t)
{
    switch (t) {
    case TAP_ATTN_WEIGHTS:    /* layout.weights */
    case TAP_DISPATCH_GATE:   /* layout.gate, .up, .hidden */
    case TAP_DISPATCH_UP:
    case TAP_DISPATCH_HIDDEN:
    case TAP_LOGITS: /* only those of the last token are computed, in a block of their own */
        return false;
    default: return tap_storage(c, t) == t;
    }
}

static void plan_scratch(const config *c, const bool *kept, int n_threads, layout *out)
{
    plan scratch = {0};
    int64_t tile = out->tile_tokens, f32 = (int64_t)sizeof(float), i64 = (int64_t)sizeof(int64_t);
    for (int t = 0; t < TAP_COUNT; t++) {
        slot shared = {
            .row_bytes = row_bytes_of(c, (tap)t, out->max_tokens), .n_rows = rows_for(c, (tap)t, tile, 1), .offset = -1};
        for (int64_t l = 0; l < (tap_is_per_layer((tap)t) ? c->num_hidden_layers : 1); l++) {
            if (kept[l * TAP_COUNT + t] || !has_tile_rows(c, (tap)t) || !tap_exists(c, (tap)t, l))
                continue;
            if (shared.offset < 0)
                shared.offset = plan_take(&scratch, shared.n_rows, shared.row_bytes);
            out->slots[l * TAP_COUNT + t] = shared;
        }
    }
    int64_t width = larger(c->moe_intermediate_size, larger(c->shared_expert_intermediate_size, c->intermediate_size));
    out->passes = plan_take(&scratch, out->max_tokens, 2 * i64);
    out->residual = plan_take(&scratch, tile, c->hidden_size * f32);
    out->context = plan_take(&scratch, tile, c->num_attention_heads * c->head_dim * f32);
    out->cos = plan_take(&scratch, tile, c->head_dim / 2 * f32);
    out->sin = plan_take(&scratch, tile, c->head_dim / 2 * f32);
    out->weights = plan_take(&scratch, larger(n_threads, c->num_attention_heads), out->max_tokens * f32);
    out->ids = plan_take(&scratch, tile, (int64_t)sizeof(int32_t));
    out->places = plan_take(&scratch, tile, c->top_k * i64);
    out->router = plan_take(&scratch, n_threads, (int64_t)router_scratch(c->num_experts));
    out->gate = plan_take(&scratch, FFN_ROWS, width * f32);
    out->up = plan_take(&scratch, FFN_ROWS, width * f32);
    out->hidden = plan_take(&scratch, FFN_ROWS, width * f32);
    out->room_floats = machine_room(larger(larger(c->hidden_size, c->num_attention_heads * c->head_dim), width));
    out->room = plan_take(&scratch, n_threads, out->room_floats * f32);
    if (out->watches) {
        out->tables = plan_take(&scratch, 3, boundary_table_bytes(c));
        out->pass_tables = plan_take(&scratch, out->max_tokens, boundary_pass_bytes(c));
        out->thread_tables = plan_take(&scratch, n_threads, boundary_thread_bytes());
    }
    out->scratch_bytes = scratch.n_bytes;
}

int64_t layout_plan(const config *c, const bool *kept, int64_t max_tokens, int n_threads, layout *out)
{
    out->max_tokens = max_tokens;
    out->tile_tokens = keeps_packed_rows(c, kept) || max_tokens < TILE_TOKENS ? max_tokens : TILE_TOKENS;
    plan_tape(c, kept, out);
    plan_scratch(c, kept, n_threads, out);
    out->logits_bytes = c->vocab_size * (int64_t)sizeof(float);

    if (out->tape_bytes < 0 || out->scratch_bytes < 0 || out->tape_bytes > INT64_MAX - out->scratch_bytes - 2 * out->logits_bytes)
        return -1;
    return out->tape_bytes + out->scratch_bytes + 2 * out->logits_bytes;
}
