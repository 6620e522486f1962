/* policies.c: lru, fifo, clock, slru, lfru by lists; those that rank, by looking at all that are there. */
#include "sim.h"

static void nothing(cachelab_sim *s, int32_t key)
{
    (void)s, (void)key;
}

static void as_before(cachelab_sim *s)
{
    (void)s;
}

/* ---- one list ---- */

static void renew(cachelab_sim *s, int32_t key)
{
    list_move(s, key, 0);
}

static void append(cachelab_sim *s, int32_t key, bool asked)
{
    (void)asked;
    list_append(s, key, 0);
}

static int32_t oldest(cachelab_sim *s)
{
    return list_victim(s, 0);
}

const policy_ops cachelab_lru = {renew, nothing, append, list_remove, oldest, as_before};
const policy_ops cachelab_fifo = {nothing, nothing, append, list_remove, oldest, as_before};

/* ---- clock: the hand stands before the oldest, and what it passes becomes the newest ---- */

static void mark(cachelab_sim *s, int32_t key)
{
    s->lists.used[key] = 1;
}

static void append_unmarked(cachelab_sim *s, int32_t key, bool asked)
{
    s->lists.used[key] = 0;
    append(s, key, asked);
}

static int32_t turn(cachelab_sim *s)
{
    for (;;) {
        int32_t key = list_oldest(s, 0);
        if (may_go(s, key) && !s->lists.used[key])
            return key;
        if (may_go(s, key))
            s->lists.used[key] = 0;
        list_move(s, key, 0);
    }
}

const policy_ops cachelab_clock = {mark, nothing, append_unmarked, list_remove, turn, as_before};

/* ---- two lists: 0 goes first, 1 holds up to half the capacity ---- */

static void spill(cachelab_sim *s)
{
    while (s->lists.units[1] > s->limit / 2)
        list_move(s, list_oldest(s, 1), 0);
}

static void protect(cachelab_sim *s, int32_t key)
{
    list_move(s, key, 1);
    spill(s);
}

static int32_t oldest_of_two(cachelab_sim *s)
{
    int32_t key = list_victim(s, 0);
    return key >= 0 ? key : list_victim(s, 1);
}

static void append_privileged(cachelab_sim *s, int32_t key, bool asked)
{
    s->ranks.uses[key] = asked;
    list_append(s, key, 1);
    spill(s);
}

static void count_and_protect(cachelab_sim *s, int32_t key)
{
    s->ranks.uses[key]++;
    protect(s, key);
}

static int32_t least_used_of_two(cachelab_sim *s)
{
    int32_t best = -1;
    for (int32_t key = list_oldest(s, 0); key >= 0 && key < s->lists.n_keys; key = s->lists.after[key])
        if (may_go(s, key) && (best < 0 || s->ranks.uses[key] < s->ranks.uses[best]))
            best = key;
    return best >= 0 ? best : list_victim(s, 1);
}

const policy_ops cachelab_slru = {protect, nothing, append, list_remove, oldest_of_two, spill};
const policy_ops cachelab_lfru = {count_and_protect, nothing, append_privileged, list_remove, least_used_of_two, spill};

/* ---- by rank ---- */

static void rank_used(cachelab_sim *s, int32_t key)
{
    ranks_used(&s->ranks, key);
}

static void rank_entered(cachelab_sim *s, int32_t key, bool asked)
{
    s->where[key] = s->n_evictable;
    s->evictable[s->n_evictable++] = key;
    if (asked)
        ranks_used(&s->ranks, key);
    else
        ranks_entered(&s->ranks, key);
}

static void rank_left(cachelab_sim *s, int32_t key)
{
    int32_t last = s->evictable[--s->n_evictable];
    s->evictable[s->where[key]] = last;
    s->where[last] = s->where[key];
}

static int32_t lowest(cachelab_sim *s)
{
    int32_t best = -1;
    rank least = {0, 0};
    for (int32_t i = 0; i < s->n_evictable; i++) {
        int32_t key = s->evictable[i];
        if (!may_go(s, key))
            continue;
        rank mine = rank_of(&s->ranks, key);
        if (best < 0 || goes_before(mine, least)) {
            best = key;
            least = mine;
        }
    }
    return best;
}

const policy_ops cachelab_ranked = {rank_used, nothing, rank_entered, rank_left, lowest, as_before};
