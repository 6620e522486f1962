/* stack.c: all capacities at once. Place i of the stack holds the key that the cache of i + 1 has and the cache of i has not.
 *
 * A set of s members changes it so. The caches up to s hold members alone: those that were there, then the missing ones in slot order
 * (belady: those asked for again soonest). A larger one holds all members, and of the others that it had those that go last; so from
 * place s on, the best of those pushed down so far and of the key in the place takes the place, until nobody is pushed any more. */
#include <stdlib.h>
#include <string.h>

#include "ranks.h"
#include "sets.h"

typedef struct pushed {
    rank rank;
    int32_t key;
} pushed;

struct cachelab_stack {
    ranks ranks;
    open_sets sets;
    int64_t n_keys, n;
    int32_t *keys;   /* [n] top first */
    pushed *heap;    /* the one that goes last at 0 */
    int64_t n_heap;
    member *sorted;  /* belady: members, soonest first */
    uint8_t *placed; /* [keys] member of the set that has its new place */
    int64_t *counts;
};

cachelab_stack *cachelab_stack_new(const cachelab_setup *setup)
{
    bool stacks = setup->policy == CACHELAB_LRU || setup->policy == CACHELAB_LFU || setup->policy == CACHELAB_LRU_K ||
                  setup->policy == CACHELAB_LEAST_STALE || setup->policy == CACHELAB_BELADY;
    cachelab_stack *s = stacks ? calloc(1, sizeof *s) : NULL;
    if (!s)
        return NULL;
    s->n_keys = (int64_t)setup->n_layers * setup->n_experts;
    s->keys = malloc((size_t)s->n_keys * sizeof *s->keys);
    s->heap = malloc(((size_t)setup->n_experts + 1) * sizeof *s->heap);
    s->sorted = malloc((size_t)setup->n_experts * sizeof *s->sorted);
    s->placed = calloc((size_t)s->n_keys, 1);
    bool whole = open_sets_init(&s->sets, setup) && ranks_init(&s->ranks, setup);
    if (!whole || !s->keys || !s->heap || !s->sorted || !s->placed) {
        cachelab_stack_free(s);
        return NULL;
    }
    return s;
}

void cachelab_stack_free(cachelab_stack *s)
{
    if (!s)
        return;
    open_sets_free(&s->sets);
    ranks_free(&s->ranks);
    free(s->keys);
    free(s->heap);
    free(s->sorted);
    free(s->placed);
    free(s);
}

static void push(cachelab_stack *s, pushed x)
{
    int64_t at = s->n_heap++;
    for (; at > 0 && goes_before(s->heap[(at - 1) / 2].rank, x.rank); at = (at - 1) / 2)
        s->heap[at] = s->heap[(at - 1) / 2];
    s->heap[at] = x;
}

/* Puts x in place of the top. */
static void sift(cachelab_stack *s, pushed x)
{
    int64_t at = 0, child;
    while ((child = 2 * at + 1) < s->n_heap) {
        if (child + 1 < s->n_heap && goes_before(s->heap[child].rank, s->heap[child + 1].rank))
            child++;
        if (goes_before(s->heap[child].rank, x.rank))
            break;
        s->heap[at] = s->heap[child];
        at = child;
    }
    s->heap[at] = x;
}

static int32_t pop(cachelab_stack *s)
{
    int32_t key = s->heap[0].key;
    pushed x = s->heap[--s->n_heap];
    if (s->n_heap)
        sift(s, x);
    return key;
}

static int soonest(const void *a, const void *b)
{
    const member *x = a, *y = b;
    if (x->next != y->next)
        return x->next < y->next ? -1 : 1;
    return x->token != y->token ? (x->token < y->token ? -1 : 1) : x->slot - y->slot;
}

static void serve(void *whom, const open_sets *sets, int32_t layer)
{
    cachelab_stack *s = whom;
    const open_set *set = &sets->layers[layer];
    const member *order = set->members;
    bool ahead = s->ranks.policy == CACHELAB_BELADY;
    if (set->n == 0)
        return;
    if (ahead) {
        memcpy(s->sorted, set->members, (size_t)set->n * sizeof *s->sorted);
        qsort(s->sorted, (size_t)set->n, sizeof *s->sorted, soonest);
        order = s->sorted;
    }
    ranks_at(&s->ranks, sets->pass, layer, true);
    int64_t at = 0, hits = 0;
    int32_t unplaced = 0;
    for (; at < set->n; at++) {
        int32_t old = at < s->n ? s->keys[at] : -1;
        bool here = old >= 0 && is_member(sets, layer, old);
        if (here) {
            s->counts[at]++;
            hits++;
        } else if (old >= 0) {
            push(s, (pushed){rank_of(&s->ranks, old), old});
        }
        if (ahead || !here || s->placed[old]) {
            while (s->placed[order[unplaced].key])
                unplaced++;
            old = order[unplaced].key;
        }
        s->placed[old] = 1;
        s->keys[at] = old;
    }
    for (; at < s->n && hits < set->n; at++) {
        int32_t old = s->keys[at];
        if (is_member(sets, layer, old)) {
            s->counts[at]++;
            hits++;
            s->keys[at] = pop(s);
            continue;
        }
        pushed x = {rank_of(&s->ranks, old), old};
        if (s->n_heap && goes_before(x.rank, s->heap[0].rank)) {
            s->keys[at] = s->heap[0].key;
            sift(s, x);
        }
    }
    if (at > s->n)
        s->n = at;
    while (s->n_heap)
        s->keys[s->n++] = pop(s);
    s->counts[s->n_keys] += set->n - hits;
    for (int32_t i = 0; i < set->n; i++) {
        s->placed[set->members[i].key] = 0;
        s->ranks.coming[set->members[i].key] = set->members[i].next;
        ranks_used(&s->ranks, set->members[i].key);
    }
}

void cachelab_stack_feed(cachelab_stack *s, const cachelab_piece *piece, int64_t *counts)
{
    s->counts = counts;
    open_sets_feed(&s->sets, piece, serve, s);
}
