/* stages.h: the stages of a pass. Each takes (session, layer), reads the rows of the tile that earlier stages left, and leaves
 * its own where taps show them; h, the residual stream behind attention, stays in scratch. Each returns false when the progress
 * callback asked to stop; then its rows are not complete. */
#ifndef COLIBRI_CORE_STAGES_H
#define COLIBRI_CORE_STAGES_H

#include "session.h"

bool stage_embed(session *s);                     /* tile_ids -> embed, and the rotary table of the tile */
bool stage_attention(session *s, int64_t layer);  /* residual x -> attn.norm, q, k, v, out */
bool stage_router(session *s, int64_t layer);     /* h = x + attn.out -> moe.input, router_logits, scores, expert_ids, gates */
bool stage_dispatcher(session *s, int64_t layer); /* expert_ids, moe.input -> dispatch.tokens, offsets, input */
bool stage_experts(session *s, int64_t layer, int64_t expert); /* -1: all. dispatch.input -> dispatch.gate, up, hidden, output */
bool stage_shared(session *s, int64_t layer);     /* moe.input -> moe.shared.output, gate; nothing where there is none */
bool stage_aggregator(session *s, int64_t layer); /* dispatch.output, gates, moe.shared -> moe.routed, moe.output */
bool stage_mlp(session *s, int64_t layer);        /* of a dense layer: h = x + attn.out -> mlp.input, mlp.output */
bool stage_residual(session *s, int64_t layer);   /* h + moe.output or mlp.output -> layers.{l}.output */
bool stage_norm(session *s);                      /* the last layer's output -> norm */
bool stage_logits(session *s);                    /* norm -> logits */

/* What is left of stage_router when its logits are known: tokens first .. first + count - 1 of the tile choose k experts each,
 * or, with keep_ids, weigh the experts that their ids name. */
void route_tile_again(session *s, int64_t layer, colibri_gate_mode gates, int64_t k, int64_t first, int64_t count, bool keep_ids);

#endif
