/* colibri_cachelab.h: what the workbench asks of caches and of the machine. A library of its own beside the engine, which needs none of
 * it: libcolibri stays as small as it is. Same rules: never prints, never exits, only libc and libm. */
#ifndef COLIBRI_CACHELAB_H
#define COLIBRI_CACHELAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. reuse distances ---------------------------------------------------------------------------------------------------- */

/* Keys in the order of their last use, the latest first. */
typedef struct cachelab_recency {
    int32_t *order; /* [n_keys] */
    int64_t n_keys, n_used;
} cachelab_recency;

/* Sets of k requests each, keys 0 .. n_keys - 1, -1 for none; those of a set are distinct. depths [n_sets, k]: how many other keys
 * were used since the last use of the same one, as the set begins; -1 at a first use, -2 where there is no request. */
void cachelab_depths(cachelab_recency *recency, const int32_t *keys, int64_t n_sets, int64_t k, int32_t *depths);

#ifdef __cplusplus
}
#endif

#endif
