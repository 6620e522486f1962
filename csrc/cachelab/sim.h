/* sim.h: one cache, as its policies see it. */
#ifndef CACHELAB_SIM_H
#define CACHELAB_SIM_H

#include "ranks.h"
#include "sets.h"

enum { RESIDENT = 1, PINNED = 2, HELD = 4, FETCHED = 8, FETCHED_IN_PREFILL = 16, ASKED_BEFORE = 32 };

/* The policies that keep their keys in order: up to four lists, oldest first. A key is in one or none. */
enum { NOWHERE = -1, N_LISTS = 4 };

typedef struct key_lists {
    int32_t n_keys;
    int32_t *before, *after; /* [keys + N_LISTS]: the last ones are the lists' own ends */
    int8_t *list;            /* [keys] or NOWHERE */
    int64_t count[N_LISTS], units[N_LISTS];
    uint8_t *used;           /* [keys] clock: the bit */
    int64_t goal;            /* arc: places of the first list */
    bool from_often;         /* arc: what is asked for left the second list */
} key_lists;

typedef struct policy_ops policy_ops;

struct cachelab_sim {
    const policy_ops *ops;
    ranks ranks;
    open_sets sets;
    key_lists lists;
    const int64_t *sizes, *bytes;
    int32_t *evictable, *where; /* ranked policies: residents in no order, and their places among them */
    int32_t n_evictable;
    int64_t n_keys, limit, places, used, pinned, held; /* units of those that may not go now: pinned ones included */
    uint8_t *state;
    int64_t *counts;
    cachelab_event *now;   /* of the set in progress */
    const member **order;  /* belady: its members, soonest first */
    int32_t watched;
    cachelab_event *events;
    int64_t n_events;
};

struct policy_ops {
    void (*used)(cachelab_sim *sim, int32_t key);                /* one that is there is asked for */
    void (*wanted)(cachelab_sim *sim, int32_t key);              /* one that is not is asked for, and will be kept */
    void (*entered)(cachelab_sim *sim, int32_t key, bool asked); /* asked for, or fetched ahead */
    void (*left)(cachelab_sim *sim, int32_t key);
    int32_t (*victim)(cachelab_sim *sim);                        /* there is one whenever this is called */
    void (*resized)(cachelab_sim *sim);
};

extern const policy_ops cachelab_ranked, cachelab_lru, cachelab_fifo, cachelab_clock, cachelab_slru, cachelab_lfru, cachelab_arc;

static inline int64_t size_of(const cachelab_sim *s, int32_t key)
{
    return s->sizes ? s->sizes[key] : 1;
}

static inline bool may_go(const cachelab_sim *s, int32_t key)
{
    return !(s->state[key] & (HELD | PINNED));
}

/* ---- lists: the end of list i is node n_keys + i, whose `after` is the oldest ---- */

static inline void list_remove(cachelab_sim *s, int32_t key)
{
    key_lists *l = &s->lists;
    l->after[l->before[key]] = l->after[key];
    l->before[l->after[key]] = l->before[key];
    l->count[l->list[key]]--;
    l->units[l->list[key]] -= size_of(s, key);
    l->list[key] = NOWHERE;
}

static inline void list_append(cachelab_sim *s, int32_t key, int8_t list)
{
    key_lists *l = &s->lists;
    int32_t end = l->n_keys + list, newest = l->before[end];
    l->after[newest] = key;
    l->before[key] = newest;
    l->after[key] = end;
    l->before[end] = key;
    l->list[key] = list;
    l->count[list]++;
    l->units[list] += size_of(s, key);
}

static inline void list_move(cachelab_sim *s, int32_t key, int8_t list)
{
    list_remove(s, key);
    list_append(s, key, list);
}

/* The oldest of a list, or -1. */
static inline int32_t list_oldest(const cachelab_sim *s, int8_t list)
{
    int32_t key = s->lists.after[s->lists.n_keys + list];
    return key < s->lists.n_keys ? key : -1;
}

/* The oldest of a list that may go, or -1. */
static inline int32_t list_victim(const cachelab_sim *s, int8_t list)
{
    int32_t key = s->lists.after[s->lists.n_keys + list];
    while (key < s->lists.n_keys && !may_go(s, key))
        key = s->lists.after[key];
    return key < s->lists.n_keys ? key : -1;
}

#endif
