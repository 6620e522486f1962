/* recency.c: reuse distances by a list in the order of last use. */
#include <string.h>

#include "../include/colibri_cachelab.h"

static int64_t depth_of(const cachelab_recency *r, int32_t key)
{
    for (int64_t d = 0; d < r->n_used; d++)
        if (r->order[d] == key)
            return d;
    return -1;
}

static void use(cachelab_recency *r, int32_t key)
{
    int64_t depth = depth_of(r, key);
    if (depth < 0)
        depth = r->n_used++;
    memmove(r->order + 1, r->order, (size_t)depth * sizeof *r->order);
    r->order[0] = key;
}

void cachelab_depths(cachelab_recency *r, const int32_t *keys, int64_t n_sets, int64_t k, int32_t *depths)
{
    for (int64_t s = 0; s < n_sets; s++, keys += k, depths += k) {
        for (int64_t slot = 0; slot < k; slot++)
            depths[slot] = keys[slot] < 0 ? -2 : (int32_t)depth_of(r, keys[slot]);
        for (int64_t slot = 0; slot < k; slot++)
            if (keys[slot] >= 0)
                use(r, keys[slot]);
    }
}
