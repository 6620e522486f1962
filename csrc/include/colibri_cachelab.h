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

/* ---- pages: which of a mapped file are in memory, and how they come and go ------------------------------------------------- */

/* What became of a call, and why it could not be as asked: one sentence without an end. */
typedef enum cachelab_status {
    CACHELAB_OK,
    CACHELAB_UNAVAILABLE, /* this system has no such call, or does not answer it for this file */
    CACHELAB_REFUSED,     /* the system said no */
    CACHELAB_ARGUMENT
} cachelab_status;

typedef struct cachelab_reason {
    char text[512];
} cachelab_reason;

/* Bytes of a regular file where it is mapped read-only: byte `offset` of the file lies at `address`. */
typedef struct cachelab_range {
    const char *file;
    int64_t offset;
    const void *address;
    int64_t n_bytes;
} cachelab_range;

int64_t cachelab_page_bytes(void);

/* Of these bytes, those on pages that are in the page cache. `pages` (or NULL): 1 or 0 for every page that holds one of them. */
cachelab_status cachelab_resident(const cachelab_range *range, int64_t *n_resident, uint8_t *pages, cachelab_reason *reason);

/* May this process be told what is resident of a file? The kernel tells an owner and who may write; to others it answers that all
 * is (CACHELAB_UNAVAILABLE). */
cachelab_status cachelab_residency_told(const char *file, cachelab_reason *reason);

/* These bytes leave the page cache: whole pages only, so that a page which also holds other bytes stays. OK when none of the whole
 * pages is resident afterwards; else REFUSED: `n_left` bytes of them are, and the reason says what may hold them. */
cachelab_status cachelab_drop(const cachelab_range *range, int64_t *n_left, cachelab_reason *reason);

/* Reads these bytes in and maps their pages, all in one call; returns when they are there. */
cachelab_status cachelab_warm(const cachelab_range *range, cachelab_reason *reason);

/* Every page that holds one of these bytes stays in memory from now on; and no longer. Locks of one page do not add up. */
cachelab_status cachelab_lock(const cachelab_range *range, cachelab_reason *reason);
cachelab_status cachelab_unlock(const cachelab_range *range, cachelab_reason *reason);

/* Page faults of this process since its start: served from memory, and those that had to read. */
cachelab_status cachelab_faults(int64_t *n_minor, int64_t *n_major, cachelab_reason *reason);

#ifdef __cplusplus
}
#endif

#endif
