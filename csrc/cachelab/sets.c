/* sets.c: see sets.h. */
#include <stdlib.h>
#include <string.h>

#include "sets.h"

bool open_sets_init(open_sets *s, const cachelab_setup *setup)
{
    size_t layers = (size_t)setup->n_layers, experts = (size_t)setup->n_experts, keys = layers * experts;
    memset(s, 0, sizeof *s);
    s->n_layers = setup->n_layers, s->n_experts = setup->n_experts;
    s->k = setup->k, s->n_ahead = setup->n_ahead;
    s->layers = calloc(layers, sizeof *s->layers);
    s->memory = malloc(keys * (sizeof(member) + 2 * sizeof(int32_t)));
    s->asked = calloc(keys, 1);
    s->named = calloc(keys, 1);
    if (!s->layers || !s->memory || !s->asked || !s->named) {
        open_sets_free(s);
        return false;
    }
    member *members = s->memory;
    int32_t *lists = (int32_t *)(members + keys);
    for (size_t layer = 0; layer < layers; layer++) {
        s->layers[layer].members = members + layer * experts;
        s->layers[layer].ahead = lists + 2 * layer * experts;
        s->layers[layer].late = lists + (2 * layer + 1) * experts;
    }
    return true;
}

void open_sets_free(open_sets *s)
{
    free(s->layers);
    free(s->memory);
    free(s->asked);
    free(s->named);
    memset(s, 0, sizeof *s);
}

static void ask(open_sets *s, const cachelab_piece *p, int32_t layer, int64_t token)
{
    open_set *set = &s->layers[layer];
    int64_t row = ((int64_t)layer * p->n_tokens + token) * s->k;
    for (int32_t slot = 0; slot < s->k; slot++) {
        int32_t id = p->ids[row + slot], key = layer * s->n_experts + id;
        if (id < 0 || s->asked[key])
            continue;
        s->asked[key] = 1;
        set->members[set->n++] = (member){p->first_token + token, key, slot, p->next ? p->next[row + slot] : 0};
    }
}

static void fetch(open_sets *s, const cachelab_piece *p, int32_t layer, int64_t token)
{
    open_set *set = &s->layers[layer];
    int64_t row = ((int64_t)layer * p->n_tokens + token) * s->n_ahead;
    for (int32_t slot = 0; slot < s->n_ahead; slot++) {
        int32_t id = p->ahead[row + slot], key = layer * s->n_experts + id;
        if (id < 0 || s->named[key])
            continue;
        bool late = p->late && p->late[row + slot];
        s->named[key] = late ? NAMED_LATE : NAMED_IN_TIME;
        if (late)
            set->late[set->n_late++] = key;
        else
            set->ahead[set->n_ahead++] = key;
    }
}

static void close_set(open_sets *s, open_set *set)
{
    for (int32_t i = 0; i < set->n; i++)
        s->asked[set->members[i].key] = 0;
    for (int32_t i = 0; i < set->n_ahead; i++)
        s->named[set->ahead[i]] = 0;
    for (int32_t i = 0; i < set->n_late; i++)
        s->named[set->late[i]] = 0;
    set->n = set->n_ahead = set->n_late = 0;
}

void open_sets_feed(open_sets *s, const cachelab_piece *p, serve_set *serve, void *whom)
{
    for (int64_t token = 0; token < p->n_tokens; token++) {
        s->pass = p->passes[token];
        s->n_tokens++;
        for (int32_t layer = 0; layer < s->n_layers; layer++) {
            ask(s, p, layer, token);
            if (p->ahead)
                fetch(s, p, layer, token);
        }
        if (p->passes[token + 1] == s->pass)
            continue;
        for (int32_t layer = 0; layer < s->n_layers; layer++) {
            serve(whom, s, layer);
            close_set(s, &s->layers[layer]);
        }
        s->n_tokens = 0;
    }
}
