/* points.h: the values of a pass that can be watched and rounded, in the order in which data flows: every tap that is computed,
 * and what stages compute between taps. A point that is no tap has a name of its own, and is counted under the first tap behind
 * it. */
#ifndef COLIBRI_CORE_POINTS_H
#define COLIBRI_CORE_POINTS_H

#include "taps.h"

typedef enum point {
    POINT_EMBED,
    POINT_ATTN_NORM, /* here begin those of a layer */
    POINT_Q_PRODUCT,
    POINT_K_PRODUCT,
    POINT_V_PRODUCT,
    POINT_Q,
    POINT_K,
    POINT_V,
    POINT_ATTN_SCORES,
    POINT_ATTN_WEIGHTS,
    POINT_CONTEXT,
    POINT_ATTN_OUT,
    POINT_MIDDLE,
    POINT_MOE_INPUT,
    POINT_ROUTER_LOGITS,
    POINT_SCORES,
    POINT_GATES,
    POINT_EXPERT_GATE, /* the four of a feed-forward network follow each other: gate, up, hidden, output */
    POINT_EXPERT_UP,
    POINT_EXPERT_HIDDEN,
    POINT_EXPERT_OUTPUT,
    POINT_SHARED_INNER_GATE,
    POINT_SHARED_INNER_UP,
    POINT_SHARED_INNER_HIDDEN,
    POINT_SHARED_OUTPUT,
    POINT_SHARED_GATE_PRODUCT,
    POINT_SHARED_GATE,
    POINT_MOE_ROUTED,
    POINT_MOE_OUTPUT,
    POINT_MLP_INPUT,
    POINT_MLP_INNER_GATE,
    POINT_MLP_INNER_UP,
    POINT_MLP_INNER_HIDDEN,
    POINT_MLP_OUTPUT,
    POINT_OUTPUT, /* here they end */
    POINT_NORM,
    POINT_LOGITS,
    POINT_COUNT
} point;

extern const colibri_point_kind point_kinds[POINT_COUNT];

static inline bool point_is_per_layer(point p)
{
    return p >= POINT_ATTN_NORM && p <= POINT_OUTPUT;
}

bool point_exists(const config *c, point p, int64_t layer);

/* The path with {l} and {e} filled in; a negative number gives '*'. */
void point_path(point p, int64_t layer, int64_t expert, char out[TAP_PATH_SIZE]);

#endif
