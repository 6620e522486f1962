/* ranks.c: see ranks.h. */
#include <stdlib.h>
#include <string.h>

#include "ranks.h"

bool ranks_init(ranks *r, const cachelab_setup *setup)
{
    size_t keys = (size_t)setup->n_layers * (size_t)setup->n_experts;
    memset(r, 0, sizeof *r);
    r->policy = setup->policy;
    r->n_layers = setup->n_layers, r->n_experts = setup->n_experts;
    r->profile = setup->uses;
    r->uses = malloc(5 * keys * sizeof *r->uses);
    r->coming = malloc(keys * sizeof *r->coming);
    if (!r->uses || !r->coming) {
        ranks_free(r);
        return false;
    }
    r->last = r->uses + keys, r->before = r->last + keys, r->seen = r->before + keys, r->used_in = r->seen + keys;
    for (size_t key = 0; key < keys; key++) {
        r->uses[key] = 0;
        r->last[key] = r->before[key] = r->seen[key] = r->used_in[key] = -1;
        r->coming[key] = setup->first ? setup->first[key] : CACHELAB_NEVER;
    }
    return true;
}

void ranks_free(ranks *r)
{
    free(r->uses);
    free(r->coming);
    memset(r, 0, sizeof *r);
}

void ranks_at(ranks *r, int64_t pass, int32_t layer, bool begun)
{
    r->pass = pass;
    r->layer = layer;
    r->begun = begun;
}

void ranks_used(ranks *r, int32_t key)
{
    r->uses[key]++;
    r->before[key] = r->seen[key];
    r->last[key] = r->seen[key] = r->clock++;
    r->used_in[key] = r->pass;
}

void ranks_entered(ranks *r, int32_t key)
{
    r->last[key] = r->clock++;
}
