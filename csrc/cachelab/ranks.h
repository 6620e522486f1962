/* ranks.h: who goes first, for the policies that rank all keys alike whatever the capacity. */
#ifndef CACHELAB_RANKS_H
#define CACHELAB_RANKS_H

#include "../include/colibri_cachelab.h"

/* The lowest goes first. */
typedef struct rank {
    int64_t first, then;
} rank;

typedef struct ranks {
    cachelab_policy policy;
    int32_t n_layers, n_experts;
    int64_t clock, pass;
    int32_t layer;       /* whose set is in progress */
    bool begun;          /* whether that set has been asked for; before, its own layer is the next to come */
    const int64_t *profile;
    int64_t *uses, *last, *before; /* [keys] uses since the start; times of the last use or entry, and of the last use but one */
    int64_t *seen;                 /* [keys] time of the last use alone, -1 before the first */
    int64_t *used_in;              /* [keys] pass of the last use, -1 before the first */
    int32_t *coming;               /* [keys] pass of the next use: belady */
} ranks;

bool ranks_init(ranks *r, const cachelab_setup *setup); /* false: no memory */
void ranks_free(ranks *r);
void ranks_at(ranks *r, int64_t pass, int32_t layer, bool begun);
void ranks_used(ranks *r, int32_t key);
void ranks_entered(ranks *r, int32_t key);

static inline bool goes_before(rank a, rank b)
{
    return a.first < b.first || (a.first == b.first && a.then < b.then);
}

static inline rank rank_of(const ranks *r, int32_t key)
{
    switch (r->policy) {
    case CACHELAB_LFU:
        return (rank){r->uses[key], r->last[key]};
    case CACHELAB_LRU_K:
        return (rank){r->before[key], r->last[key]};
    case CACHELAB_LEAST_STALE: {
        int32_t ahead = key / r->n_experts - r->layer;
        ahead += ahead < 0 || (ahead == 0 && r->begun) ? r->n_layers : 0;
        return (rank){(r->used_in[key] == r->pass ? (int64_t)r->n_layers + 1 : 0) + r->n_layers - ahead, r->last[key]};
    }
    case CACHELAB_STATIC:
        return (rank){r->profile[key], -(int64_t)key};
    case CACHELAB_BELADY:
        if (r->coming[key] == CACHELAB_NEVER)
            return (rank){INT64_MIN, key};
        return (rank){-((int64_t)r->coming[key] * r->n_layers + key / r->n_experts), key};
    default:
        return (rank){r->last[key], 0};
    }
}

#endif
