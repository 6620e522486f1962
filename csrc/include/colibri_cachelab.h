/* colibri_cachelab.h: what the workbench asks of caches and of the machine. A library of its own beside the engine, which needs none of
 * it: libcolibri stays as small as it is. Same rules: never prints, never exits, only libc and libm. */
#ifndef COLIBRI_CACHELAB_H
#define COLIBRI_CACHELAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri.h" /* the types of a pass' stages; no function of it is called */

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

/* ---- counters: what the CPU counts of itself ------------------------------------------------------------------------------ */

enum { CACHELAB_CYCLES = 0, CACHELAB_INSTRUCTIONS, CACHELAB_L1D_MISSES, CACHELAB_LLC_MISSES, CACHELAB_DTLB_MISSES, CACHELAB_COUNTERS };

const char *cachelab_counter_name(int counter); /* "cycles", "instructions", "l1d_misses", "llc_misses", "dtlb_misses" */

/* What a counter said: events in user mode, and the nanoseconds in which it was to count and really did. These differ when the CPU has
 * fewer counters than are asked for and the system takes turns. */
typedef struct cachelab_count {
    uint64_t value, enabled, running;
} cachelab_count;

/* The events of the whole time, as if the counter had run all of it; NaN when it never ran. */
double cachelab_scaled(cachelab_count count);

typedef struct cachelab_counters {
    int files[CACHELAB_COUNTERS];  /* -1 where the counter cannot be had */
    int errors[CACHELAB_COUNTERS]; /* then the errno that says why */
} cachelab_counters;

/* Opens one event, as perf_event_open does: a file, or -1 and errno. */
typedef int (*cachelab_open_event)(uint32_t type, uint64_t config);

/* Counts the calling thread and every thread that it makes from now on: open them before the session whose threads they are to
 * count. open_event NULL: the system's own. */
void cachelab_counters_open(cachelab_counters *counters, cachelab_open_event open_event);
void cachelab_counters_close(cachelab_counters *counters);
void cachelab_counters_read(const cachelab_counters *counters, cachelab_count out[CACHELAB_COUNTERS]); /* zeros where there is none */

/* In words, why an event cannot be had; `paranoid` is what kernel.perf_event_paranoid says, -100 when it cannot be read. */
enum { CACHELAB_REASON_SIZE = 160 };
void cachelab_counter_reason(int error, int paranoid, char out[CACHELAB_REASON_SIZE]);
int cachelab_perf_event_paranoid(void);

/* ---- stages: what each stage of a pass took ------------------------------------------------------------------------------- */

enum { CACHELAB_STAGES = COLIBRI_STAGE_NONE };

/* What the calls of one stage of one layer took together. */
typedef struct cachelab_stage_sum {
    int64_t calls; /* one for each tile */
    double seconds;
    int64_t minor_faults, major_faults; /* page faults of the process; major ones waited for a disk */
    cachelab_count counts[CACHELAB_COUNTERS];
} cachelab_stage_sum;

/* Give cachelab_stages_observe and one of these to colibri_session_observe. The clock is always read; faults and counters, which
 * cost a call of the system each, where asked for. */
typedef struct cachelab_stages {
    cachelab_stage_sum *sums; /* [n_layers + 1, CACHELAB_STAGES]; what lies outside layers is row n_layers */
    int64_t n_layers;
    bool faults;
    const cachelab_counters *counters; /* NULL: none */
    int64_t tile_tokens;               /* of the largest tile seen */
    cachelab_stage_sum begin;          /* as the stage in progress began */
} cachelab_stages;

void cachelab_stages_observe(void *stages, const colibri_stage_event *event);

/* ---- limits: what the machine can do at best ------------------------------------------------------------------------------ */

/* Memory to be read, of which each thread reads some rows. */
typedef struct cachelab_stream {
    const void *data;
    int64_t rows, row_bytes;
} cachelab_stream;

/* Seconds in which `threads` threads (1 to 256) read the streams one after the other. A thread reads 1 to 8 places of its part in
 * turn, and prefetches `ahead` bytes before each (0: it does not). Below 0 when the threads cannot be made. */
double cachelab_read_seconds(const cachelab_stream *ranges, int64_t n_ranges, int threads, int streams, int ahead);

/* `rounds` multiply-adds of each of a dozen vectors, with the instruction set that colibri_isa names (NULL: the widest here), and how
 * many operations that is: two for each element; 0 where it cannot run. The result only keeps them from being left out. */
float cachelab_fma_chains(const char *isa, int64_t rounds, float seed, double *operations);

/* Operations in a second of so many threads together; below 0 when it cannot be run. */
double cachelab_fma_rate(const char *isa, int threads, int64_t rounds);

#ifdef __cplusplus
}
#endif

#endif
