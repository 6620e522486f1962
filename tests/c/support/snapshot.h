/* snapshot.h: every value that a session shows, under its tap path, for comparing two runs byte by byte.
 *
 * The rows of an expert are joined over all passes, so that runs cut into different passes can be compared. The packed rows as
 * such (dispatch.*) lie pass by pass and are left out: the experts' rows are views of them. */
#ifndef COLIBRI_TESTS_SNAPSHOT_H
#define COLIBRI_TESTS_SNAPSHOT_H

#include "colibri.h"

typedef struct snapshot_entry {
    char path[96];
    int64_t n_bytes;
    unsigned char *bytes; /* contiguous; every NaN as 0x7FC00000 */
} snapshot_entry;

typedef struct snapshot {
    int64_t n;
    snapshot_entry *entries;
} snapshot;

snapshot snapshot_take(colibri_session *s); /* all kept taps, and the last logits under "last_logits" */
void snapshot_free(snapshot *s);

const snapshot_entry *snapshot_find(const snapshot *s, const char *path);
int64_t snapshot_nonfinite(const snapshot *s, const char *path); /* NaN and Inf under one path */

/* Every path of `part` is in `whole` with the same bytes; prints the first that is not. Returns how many paths were compared. */
int64_t snapshot_same(const snapshot *part, const snapshot *whole, const char *what);

#endif
