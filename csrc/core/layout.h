/* layout.h: where every row of a session lies, planned before the first pass.
 *
 * A tap that is kept has rows for the whole session in the tape; one that is not has rows for one tile in scratch, used again by
 * every layer. Stages write to either place directly, so keeping a tap copies nothing.
 *
 * A pass runs tile by tile, of at most TILE_TOKENS tokens, unless packed expert rows are kept: these lie pass by pass, expert by
 * expert, so such a pass is one tile. */
#ifndef COLIBRI_CORE_LAYOUT_H
#define COLIBRI_CORE_LAYOUT_H

#include "taps.h"

#define TILE_TOKENS 512 /* enough rows for each expert that a tile is bound by arithmetic, not by reading weights */
#define FFN_ROWS 512    /* rows of gate, up and hidden in scratch: a tile's experts run in groups of so many packed rows */

typedef struct slot {
    int64_t offset;    /* bytes from the start of the tape or of scratch */
    int64_t row_bytes;
    int64_t n_rows;    /* reserved; in the tape: over the whole session */
    bool kept;         /* in the tape */
} slot;

typedef struct layout {
    int64_t max_tokens, tile_tokens;
    bool watches;    /* values are counted: boundary.h. Given by the caller, too */
    slot *slots;     /* [num_hidden_layers, TAP_COUNT], filled at the place of storage (taps.h) */
    int64_t tape_bytes, kv_bytes, scratch_bytes, logits_bytes;

    /* Working memory that no tap shows: byte offsets in scratch. T is tile_tokens. */
    int64_t passes;             /* [max_tokens, 2] int64: start and stop of each pass */
    int64_t residual;           /* [T, H] residual stream between attention and feed-forward */
    int64_t context;            /* [T, heads, head_dim] weighted sums of values */
    int64_t cos, sin;           /* [T, head_dim / 2] */
    int64_t weights;            /* [threads or heads, max_tokens] attention probabilities of one query */
    int64_t ids;                /* [T] int32: token ids of a stepped pass */
    int64_t places;             /* [T, k] int64: packed row of each choice */
    int64_t router;             /* [threads] router_scratch() */
    int64_t gate, up, hidden;   /* [FFN_ROWS, widest feed-forward network] */
    int64_t room, room_floats;  /* [threads, room_floats] machine_room() */
    int64_t tables, pass_tables, thread_tables; /* [3], [max_tokens] and [threads] of what a boundary counts */
} layout;

/* Fills *out but for `slots` and `watches`, which the caller gives, for the taps marked in kept (capture.h).
 * Returns the bytes of all blocks together; < 0 when they overflow. */
int64_t layout_plan(const config *c, const bool *kept, int64_t max_tokens, int n_threads, layout *out);

static inline const slot *layout_slot(const layout *p, const config *c, tap t, int64_t layer)
{
    return &p->slots[(tap_is_per_layer(t) ? layer : 0) * TAP_COUNT + tap_storage(c, t)];
}

#endif
