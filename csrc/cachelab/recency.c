/* recency.c: reuse distances. Every key has a bit at the place of its last use on a line of time; the distance is the number of bits
 * after it. Counts by word and by block of words keep that short; when the line is full, its bits are moved together. */
#include <stdlib.h>
#include <string.h>

#include "../include/colibri_cachelab.h"

enum { WORD = 64, BLOCK = 64 }; /* bits, words */

struct cachelab_recency {
    int32_t n_layers, n_experts, k;
    int64_t n_keys, n_places, next; /* places of the line; the first free one */
    int64_t n_used;
    int64_t *place;     /* [n_keys] of the last use, -1 before the first */
    int32_t *key_at;    /* [n_places] */
    uint64_t *bits;     /* [n_places / WORD] */
    uint32_t *in_word;  /* the same: bits of each */
    uint32_t *in_block; /* [n_places / WORD / BLOCK] */
    int32_t *found;     /* [k] */
};

static int ones(uint64_t x)
{
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    return (int)(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u >> 56);
}

cachelab_recency *cachelab_recency_new(int32_t n_layers, int32_t n_experts, int32_t k)
{
    cachelab_recency *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->n_layers = n_layers, r->n_experts = n_experts, r->k = k;
    r->n_keys = (int64_t)n_layers * n_experts;
    r->n_places = (4 * r->n_keys + 4 * (int64_t)k) / WORD * WORD + WORD; /* moved together once in 3 keys' uses at most */
    size_t words = (size_t)r->n_places / WORD;
    r->place = malloc((size_t)r->n_keys * sizeof *r->place);
    r->key_at = malloc((size_t)r->n_places * sizeof *r->key_at);
    r->bits = calloc(words, sizeof *r->bits);
    r->in_word = calloc(words, sizeof *r->in_word);
    r->in_block = calloc(words / BLOCK + 1, sizeof *r->in_block);
    r->found = malloc((size_t)k * sizeof *r->found);
    if (!r->place || !r->key_at || !r->bits || !r->in_word || !r->in_block || !r->found) {
        cachelab_recency_free(r);
        return NULL;
    }
    for (int64_t key = 0; key < r->n_keys; key++)
        r->place[key] = -1;
    return r;
}

void cachelab_recency_free(cachelab_recency *r)
{
    if (!r)
        return;
    free(r->place);
    free(r->key_at);
    free(r->bits);
    free(r->in_word);
    free(r->in_block);
    free(r->found);
    free(r);
}

static void flip(cachelab_recency *r, int64_t place, uint32_t step)
{
    int64_t word = place / WORD;
    r->bits[word] ^= (uint64_t)1 << place % WORD;
    r->in_word[word] += step;
    r->in_block[word / BLOCK] += step;
}

static void use(cachelab_recency *r, int32_t key)
{
    if (r->place[key] < 0)
        r->n_used++;
    else
        flip(r, r->place[key], (uint32_t)-1);
    r->place[key] = r->next;
    r->key_at[r->next] = key;
    flip(r, r->next++, 1);
}

/* The keys in their order at the beginning of the line. */
static void compact(cachelab_recency *r)
{
    int64_t words = r->n_places / WORD, to = 0;
    for (int64_t place = 0; place < r->next; place++)
        if (r->bits[place / WORD] >> place % WORD & 1)
            r->key_at[to++] = r->key_at[place];
    memset(r->bits, 0, (size_t)words * sizeof *r->bits);
    memset(r->in_word, 0, (size_t)words * sizeof *r->in_word);
    memset(r->in_block, 0, ((size_t)words / BLOCK + 1) * sizeof *r->in_block);
    for (r->next = 0; r->next < to; r->next++) {
        r->place[r->key_at[r->next]] = r->next;
        flip(r, r->next, 1);
    }
}

/* Bits after the place. */
static int32_t after(const cachelab_recency *r, int64_t place)
{
    int64_t word = place / WORD, block = word / BLOCK, last = (r->next - 1) / WORD;
    uint32_t count = 0;
    int64_t end = (block + 1) * BLOCK < last + 1 ? (block + 1) * BLOCK : last + 1;
    for (int64_t w = word + 1; w < end; w++)
        count += r->in_word[w];
    for (int64_t b = block + 1; b <= last / BLOCK; b++)
        count += r->in_block[b];
    return (int32_t)count + ones(r->bits[word] >> place % WORD >> 1);
}

void cachelab_recency_feed(cachelab_recency *r, const int32_t *ids, int64_t n_tokens, int32_t *depths, int64_t *counts)
{
    for (int64_t token = 0; token < n_tokens; token++)
        for (int32_t layer = 0; layer < r->n_layers; layer++) {
            int64_t row = ((int64_t)layer * n_tokens + token) * r->k;
            int32_t base = layer * r->n_experts;
            if (r->next + r->k > r->n_places)
                compact(r);
            int64_t begin = r->next;
            for (int32_t slot = 0; slot < r->k; slot++) {
                int32_t id = ids[row + slot];
                r->found[slot] = id < 0 ? -2 : r->place[base + id] < 0 ? -1 : after(r, r->place[base + id]);
            }
            for (int32_t slot = 0; slot < r->k; slot++) {
                int32_t id = ids[row + slot];
                if (id < 0)
                    continue;
                if (r->place[base + id] >= begin)
                    r->found[slot] = -2;
                else
                    use(r, base + id);
                if (counts && r->found[slot] > -2)
                    counts[r->found[slot] < 0 ? r->n_keys : r->found[slot]]++;
            }
            if (depths)
                memcpy(depths + row, r->found, (size_t)r->k * sizeof *depths);
        }
}
