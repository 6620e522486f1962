/* hierarchy.c: caches and TLBs of a processor, as a chain of set-associative tables. */
#include <string.h>

#include "../include/colibri_cachelab.h"

void cachelab_table_clear(cachelab_table *t)
{
    memset(t->tags, 0xff, (size_t)(t->n_sets * t->ways) * sizeof *t->tags);
    t->accesses = t->misses = 0;
}

/* Whether `block` was there; it is now, at the head of its set, whose ways stand in the order of their last use. */
static bool touch(cachelab_table *t, int64_t block)
{
    int64_t *set = t->tags + block % t->n_sets * t->ways, way = 0;
    if (set[0] == block)
        return true;
    while (way < t->ways && set[way] != block)
        way++;
    bool hit = way < t->ways;
    memmove(set + 1, set, (size_t)(hit ? way : t->ways - 1) * sizeof *set);
    set[0] = block;
    return hit;
}

void cachelab_walk(cachelab_table *chain, int64_t n_tables, const int64_t *addresses, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t level = 0; level < n_tables; level++) {
            cachelab_table *t = &chain[level];
            t->accesses++;
            if (touch(t, addresses[i] >> t->shift))
                break;
            t->misses++;
        }
}
