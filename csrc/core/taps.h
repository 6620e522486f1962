/* taps.h: the table of every named intermediate. A row added here appears in the engine, the bindings and the documentation.
 *
 * The first axis of a tap says how its rows grow: T one row a token, N one row a chosen (token, expert) pair, passes one row a
 * pass, n_e the rows of one expert in one pass (a piece of the N rows). `heads,T,S` alone is laid out head by head. */
#ifndef COLIBRI_CORE_TAPS_H
#define COLIBRI_CORE_TAPS_H

#include "../model/config.h"

typedef enum tap {
    TAP_EMBED,
    TAP_ATTN_NORM,
    TAP_ATTN_Q,
    TAP_ATTN_K,
    TAP_ATTN_V,
    TAP_ATTN_WEIGHTS,
    TAP_ATTN_OUT,
    TAP_MOE_INPUT,
    TAP_ROUTER_LOGITS,
    TAP_SCORES,
    TAP_EXPERT_IDS,
    TAP_GATES,
    TAP_DISPATCH_TOKENS,
    TAP_DISPATCH_OFFSETS,
    TAP_DISPATCH_INPUT,
    TAP_DISPATCH_GATE,
    TAP_DISPATCH_UP,
    TAP_DISPATCH_HIDDEN,
    TAP_DISPATCH_OUTPUT,
    TAP_EXPERT_TOKENS,
    TAP_EXPERT_INPUT,
    TAP_EXPERT_GATE,
    TAP_EXPERT_UP,
    TAP_EXPERT_HIDDEN,
    TAP_EXPERT_OUTPUT,
    TAP_MOE_ROUTED,
    TAP_SHARED_OUTPUT,
    TAP_SHARED_GATE,
    TAP_MOE_OUTPUT,
    TAP_MLP_INPUT,
    TAP_MLP_OUTPUT,
    TAP_OUTPUT,
    TAP_NORM,
    TAP_LOGITS,
    TAP_COUNT
} tap;

extern const colibri_tap_kind tap_kinds[TAP_COUNT];

typedef enum tap_rows { ROWS_TOKENS, ROWS_PACKED, ROWS_PASSES, ROWS_OF_EXPERT, ROWS_HEADS } tap_rows;

tap_rows tap_rows_of(tap t);

/* Sizes of the axes after the first one ("H" -> hidden_size ...) into shape[]; returns how many there are. Not for ROWS_HEADS. */
int tap_row_shape(const config *c, tap t, int64_t shape[COLIBRI_MAX_DIMS - 1]);
int64_t tap_row_bytes(const config *c, tap t);

static inline bool tap_is_per_layer(tap t)
{
    return tap_kinds[t].scope != COLIBRI_SCOPE_MODEL;
}

bool tap_exists(const config *c, tap t, int64_t layer);

/* Where the rows of a tap really lie: the rows of one expert are pieces of the packed ones, and without a shared expert
 * what the block returns is the gated sum itself. */
tap tap_storage(const config *c, tap t);

#define TAP_PATH_SIZE 96
/* The path with {l} and {e} filled in; a negative number gives '*'. */
void tap_path(tap t, int64_t layer, int64_t expert, char out[TAP_PATH_SIZE]);
void path_fill(const char *path, int64_t layer, int64_t expert, char out[TAP_PATH_SIZE]);

#endif
