/* sim.c: one cache: sets, room, counts. Who goes is the policy's business. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static const policy_ops *const OPS[CACHELAB_N_POLICIES] = {
    [CACHELAB_LRU] = &cachelab_lru,    [CACHELAB_LFU] = &cachelab_ranked,   [CACHELAB_FIFO] = &cachelab_fifo,
    [CACHELAB_CLOCK] = &cachelab_clock, [CACHELAB_SLRU] = &cachelab_slru,   [CACHELAB_LFRU] = &cachelab_lfru,
    [CACHELAB_LRU_K] = &cachelab_ranked, [CACHELAB_ARC] = &cachelab_arc,    [CACHELAB_LEAST_STALE] = &cachelab_ranked,
    [CACHELAB_STATIC] = &cachelab_ranked, [CACHELAB_BELADY] = &cachelab_ranked,
};

static bool lists_init(key_lists *l, int32_t n_keys)
{
    size_t nodes = (size_t)n_keys + N_LISTS;
    l->n_keys = n_keys;
    l->before = malloc(2 * nodes * sizeof *l->before);
    l->list = malloc((size_t)n_keys);
    l->used = calloc((size_t)n_keys, 1);
    if (!l->before || !l->list || !l->used)
        return false;
    l->after = l->before + nodes;
    memset(l->list, NOWHERE, (size_t)n_keys);
    for (int32_t end = n_keys; end < n_keys + N_LISTS; end++)
        l->before[end] = l->after[end] = end;
    return true;
}

cachelab_sim *cachelab_sim_new(const cachelab_setup *setup, int64_t limit, int64_t places)
{
    cachelab_sim *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->ops = OPS[setup->policy];
    s->n_keys = (int64_t)setup->n_layers * setup->n_experts;
    s->sizes = setup->sizes, s->bytes = setup->bytes;
    s->limit = limit, s->places = places;
    s->evictable = malloc(2 * (size_t)s->n_keys * sizeof *s->evictable);
    s->state = calloc((size_t)s->n_keys, 1);
    s->now = malloc((size_t)setup->n_experts * sizeof *s->now);
    s->order = malloc((size_t)setup->n_experts * sizeof *s->order);
    s->counts = calloc((size_t)setup->n_layers * 2 * CACHELAB_N_COUNTS, sizeof *s->counts);
    bool whole = open_sets_init(&s->sets, setup) && ranks_init(&s->ranks, setup) && lists_init(&s->lists, (int32_t)s->n_keys);
    if (!whole || !s->evictable || !s->state || !s->now || !s->order || !s->counts) {
        cachelab_sim_free(s);
        return NULL;
    }
    s->where = s->evictable + s->n_keys;
    return s;
}

void cachelab_sim_free(cachelab_sim *s)
{
    if (!s)
        return;
    open_sets_free(&s->sets);
    ranks_free(&s->ranks);
    free(s->lists.before);
    free(s->lists.list);
    free(s->lists.used);
    free(s->evictable);
    free(s->state);
    free(s->now);
    free(s->order);
    free(s->counts);
    free(s);
}

/* ---- who is there ---- */

static int64_t *counts_of(const cachelab_sim *s, int32_t key, bool prefill)
{
    return s->counts + (key / s->sets.n_experts * 2 + !prefill) * CACHELAB_N_COUNTS;
}

static void hold(cachelab_sim *s, int32_t key)
{
    if ((s->state[key] & (RESIDENT | PINNED)) == RESIDENT)
        s->held += size_of(s, key);
    s->state[key] |= HELD;
}

static void release(cachelab_sim *s, int32_t key)
{
    if ((s->state[key] & (RESIDENT | PINNED)) == RESIDENT)
        s->held -= size_of(s, key);
    s->state[key] &= (uint8_t)~HELD;
}

static void evict(cachelab_sim *s, int32_t key)
{
    if (s->state[key] & FETCHED)
        counts_of(s, key, s->state[key] & FETCHED_IN_PREFILL)[CACHELAB_WASTED]++;
    s->ops->left(s, key);
    s->used -= size_of(s, key);
    s->state[key] &= (uint8_t)~(RESIDENT | FETCHED | FETCHED_IN_PREFILL);
}

static void enter(cachelab_sim *s, int32_t key, bool asked)
{
    s->state[key] |= RESIDENT;
    s->used += size_of(s, key);
    if (s->state[key] & HELD)
        s->held += size_of(s, key);
    s->ops->entered(s, key, asked);
}

/* Makes room for a key and lets it in; when those that may not go leave none, nobody goes. */
static bool admit(cachelab_sim *s, int32_t key, bool asked, cachelab_event *event)
{
    int64_t size = size_of(s, key);
    if (s->ranks.policy == CACHELAB_STATIC || size > s->limit - s->held)
        return false;
    if (asked)
        s->ops->wanted(s, key);
    while (s->used > s->limit - size) {
        int32_t victim = s->ops->victim(s);
        evict(s, victim);
        if (event && event->n_evicted++ == 0)
            event->evicted = victim;
    }
    enter(s, key, asked);
    return true;
}

bool cachelab_sim_place(cachelab_sim *s, int32_t key, bool pinned)
{
    if (s->state[key] & RESIDENT)
        return true;
    if (size_of(s, key) > s->limit - s->used)
        return false;
    if (!pinned) {
        enter(s, key, false);
        return true;
    }
    s->state[key] |= RESIDENT | PINNED;
    s->used += size_of(s, key);
    s->held += size_of(s, key);
    s->pinned += size_of(s, key);
    return true;
}

void cachelab_sim_resize(cachelab_sim *s, int64_t limit, int64_t places)
{
    ranks_at(&s->ranks, -2, 0, false); /* between two passes nothing is in use, and layer 0 comes next */
    s->limit = limit, s->places = places;
    while (s->used > s->limit)
        evict(s, s->ops->victim(s));
    s->ops->resized(s);
}

/* ---- one set ---- */

static void count_read(cachelab_sim *s, int32_t key, bool prefill, int what)
{
    counts_of(s, key, prefill)[what]++;
    counts_of(s, key, prefill)[CACHELAB_BYTES_READ] += s->bytes ? s->bytes[key] : 1;
}

/* What a plan names, none for another of it. Members of a set that was served are left out. */
static void fetch(cachelab_sim *s, const int32_t *keys, int32_t n, bool prefill, bool served)
{
    for (int32_t i = 0; i < n; i++)
        hold(s, keys[i]);
    for (int32_t i = 0; i < n; i++) {
        if (s->state[keys[i]] & RESIDENT || (served && s->sets.asked[keys[i]]) || !admit(s, keys[i], false, NULL))
            continue;
        count_read(s, keys[i], prefill, CACHELAB_PREFETCHED);
        s->state[keys[i]] |= prefill ? FETCHED | FETCHED_IN_PREFILL : FETCHED;
    }
    for (int32_t i = 0; i < n; i++)
        release(s, keys[i]);
}

static int soonest(const void *a, const void *b)
{
    const member *x = *(const member *const *)a, *y = *(const member *const *)b;
    return x->next != y->next ? (x->next < y->next ? -1 : 1) : x < y ? -1 : x > y;
}

/* Members that stay until their set ends: all; of a set without room for all, belady takes those asked for again soonest. */
static void hold_members(cachelab_sim *s, const open_set *set)
{
    int64_t all = 0, room = s->limit - s->pinned;
    for (int32_t i = 0; i < set->n; i++)
        all += s->state[set->members[i].key] & PINNED ? 0 : size_of(s, set->members[i].key);
    if (s->ranks.policy != CACHELAB_BELADY || all <= room) {
        for (int32_t i = 0; i < set->n; i++)
            hold(s, set->members[i].key);
        return;
    }
    for (int32_t i = 0; i < set->n; i++)
        s->order[i] = &set->members[i];
    qsort(s->order, (size_t)set->n, sizeof *s->order, soonest);
    for (int32_t i = 0; i < set->n; i++) {
        int64_t size = s->state[s->order[i]->key] & PINNED ? 0 : size_of(s, s->order[i]->key);
        if (size > room)
            continue;
        room -= size;
        hold(s, s->order[i]->key);
    }
}

static cachelab_outcome outcome_of(const cachelab_sim *s, int32_t key)
{
    uint8_t state = s->state[key];
    if (state & RESIDENT)
        return state & PINNED ? CACHELAB_PIN : state & FETCHED ? CACHELAB_PREFETCH : CACHELAB_HIT;
    return s->sets.named[key] == NAMED_LATE ? CACHELAB_LATE : CACHELAB_MISS;
}

static void request(cachelab_sim *s, const member *m, bool prefill, cachelab_event *event)
{
    int64_t *counts = counts_of(s, m->key, prefill);
    cachelab_outcome outcome = (cachelab_outcome)event->outcome;
    counts[CACHELAB_REQUESTS]++;
    counts[CACHELAB_FIRST_USES] += outcome == CACHELAB_MISS && !(s->state[m->key] & ASKED_BEFORE);
    s->state[m->key] = (uint8_t)((s->state[m->key] | ASKED_BEFORE) & ~(FETCHED | FETCHED_IN_PREFILL));
    if (outcome == CACHELAB_PIN)
        counts[CACHELAB_PIN_HITS]++;
    else if (outcome == CACHELAB_HIT || outcome == CACHELAB_PREFETCH)
        counts[outcome == CACHELAB_HIT ? CACHELAB_POLICY_HITS : CACHELAB_PREFETCH_HITS]++;
    else
        count_read(s, m->key, prefill, outcome == CACHELAB_MISS ? CACHELAB_MISSES : CACHELAB_PREFETCHED);
    counts[CACHELAB_LATE_HITS] += outcome == CACHELAB_LATE;
    if (s->state[m->key] & PINNED)
        return;
    if (s->state[m->key] & RESIDENT)
        s->ops->used(s, m->key);
    else if (!(s->state[m->key] & HELD && admit(s, m->key, true, event)))
        ranks_used(&s->ranks, m->key);
}

static void serve(void *whom, const open_sets *sets, int32_t layer)
{
    cachelab_sim *s = whom;
    const open_set *set = &sets->layers[layer];
    bool prefill = sets->n_tokens > 1;
    ranks_at(&s->ranks, sets->pass, layer, false);
    fetch(s, set->ahead, set->n_ahead, prefill, false);
    ranks_at(&s->ranks, sets->pass, layer, true);
    for (int32_t i = 0; i < set->n; i++) {
        const member *m = &set->members[i];
        s->now[i] = (cachelab_event){m->token, m->slot, m->key, (int32_t)outcome_of(s, m->key), 0, -1, 0};
        s->ranks.coming[m->key] = m->next;
    }
    hold_members(s, set);
    for (int32_t i = 0; i < set->n; i++)
        request(s, &set->members[i], prefill, &s->now[i]);
    for (int32_t i = 0; i < set->n; i++) {
        int32_t key = set->members[i].key;
        s->now[i].kept = (s->state[key] & RESIDENT) != 0;
        counts_of(s, key, prefill)[CACHELAB_NOT_KEPT] += s->now[i].outcome >= CACHELAB_LATE && !s->now[i].kept;
        release(s, key);
    }
    if (s->events && layer == s->watched) {
        memcpy(s->events + s->n_events, s->now, (size_t)set->n * sizeof *s->now);
        s->n_events += set->n;
    }
    fetch(s, set->late, set->n_late, prefill, true);
}

/* ---- many sets ---- */

int64_t cachelab_sim_feed(cachelab_sim *s, const cachelab_piece *piece, int32_t watched, cachelab_event *events)
{
    s->watched = watched, s->events = events, s->n_events = 0;
    open_sets_feed(&s->sets, piece, serve, s);
    return s->n_events;
}

int64_t cachelab_sim_used(const cachelab_sim *s)
{
    return s->used;
}

int64_t cachelab_sim_pinned(const cachelab_sim *s)
{
    return s->pinned;
}

bool cachelab_sim_holds(const cachelab_sim *s, int32_t key)
{
    return s->state[key] & RESIDENT;
}

/* What was fetched and waits for its first use counts as wasted until then. */
void cachelab_sim_counts(const cachelab_sim *s, int64_t *counts)
{
    memcpy(counts, s->counts, (size_t)s->sets.n_layers * 2 * CACHELAB_N_COUNTS * sizeof *counts);
    for (int32_t key = 0; key < s->n_keys; key++)
        if (s->state[key] & FETCHED)
            counts[counts_of(s, key, s->state[key] & FETCHED_IN_PREFILL) - s->counts + CACHELAB_WASTED]++;
}
