/* router.h: which experts read a token, and how strongly each counts. */
#ifndef COLIBRI_CORE_ROUTER_H
#define COLIBRI_CORE_ROUTER_H

#include "machine.h"

typedef struct router {
    int64_t n_experts, top_k;
    bool select_by_logits;   /* scores are the logits themselves; else softmax over all experts */
    colibri_gate_mode gates; /* never COLIBRI_GATES_MODEL */
    colibri_rounding scores; /* what is emulated there */
    unsigned char *scratch;  /* router_scratch() bytes for each thread, 8-byte aligned */
} router;

size_t router_scratch(int64_t n_experts); /* bytes of one thread, a multiple of 64 */

/* x [n, H], w [E, H] -> logits [n, E], scores [n, E], ids [n, k] by descending score, gates [n, k].
 * Ids are distinct and in range whatever the scores are: NaN counts as smaller than every number, ties go to the lower id. */
void route(machine *m, const router *r, const float *x, int64_t n, const matrix *w, float *logits, float *scores, int32_t *ids,
           float *gates);

/* The same for one token whose logits are known, in two steps: its scores; and by them n_chosen <= top_k experts, where the other
 * slots get id -1 and gate 0. */
void route_scores(const kernels *k, const router *r, const float *logits, float *scores);
void route_choose(const kernels *k, const router *r, int64_t n_chosen, const float *logits, const float *scores, int32_t *ids,
                  float *gates, unsigned char *scratch);

/* Gates of the experts that ids [k] name, in range and distinct but for -1: such a slot gets 0 and takes part in no sum. */
void route_gates(const kernels *k, const router *r, const float *logits, const int32_t *ids, float *gates,
                 unsigned char *scratch);

#endif
