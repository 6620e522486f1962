/* sets.h: the sets of a trace, gathered token by token, served when their pass ends. */
#ifndef CACHELAB_SETS_H
#define CACHELAB_SETS_H

#include "../include/colibri_cachelab.h"

typedef struct member {
    int64_t token;
    int32_t key, slot, next;
} member;

/* What the pass in progress asks of one layer, in order of first request; what is fetched ahead for it, in time and late. */
typedef struct open_set {
    int32_t n, n_ahead, n_late;
    member *members; /* each list holds up to n_experts */
    int32_t *ahead, *late;
} open_set;

enum { NAMED_IN_TIME = 1, NAMED_LATE = 2 };

typedef struct open_sets {
    int32_t n_layers, n_experts, k, n_ahead;
    int64_t pass, n_tokens; /* of the pass in progress */
    open_set *layers;
    uint8_t *asked, *named; /* [keys] in the open set; in the open plan */
    void *memory;
} open_sets;

/* Other layers' sets may be open too. */
static inline bool is_member(const open_sets *sets, int32_t layer, int32_t key)
{
    return sets->asked[key] && key / sets->n_experts == layer;
}

typedef void serve_set(void *whom, const open_sets *sets, int32_t layer);

bool open_sets_init(open_sets *sets, const cachelab_setup *setup); /* false: no memory */
void open_sets_free(open_sets *sets);
void open_sets_feed(open_sets *sets, const cachelab_piece *piece, serve_set *serve, void *whom);

#endif
