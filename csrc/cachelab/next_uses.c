/* next_uses.c: a trace read backwards, for the policy that knows the future. */
#include "../include/colibri_cachelab.h"

void cachelab_next_uses(const int32_t *ids, const int64_t *passes, int64_t n_tokens, int64_t k, int32_t *last, int32_t *next,
                        int32_t *out)
{
    for (int64_t token = n_tokens; token-- > 0;)
        for (int64_t slot = k; slot-- > 0;) {
            int32_t id = ids[token * k + slot], pass = (int32_t)passes[token];
            if (id >= 0 && last[id] != pass) {
                next[id] = last[id];
                last[id] = pass;
            }
            out[token * k + slot] = id < 0 ? CACHELAB_NEVER : next[id];
        }
}
