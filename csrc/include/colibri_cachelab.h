/* colibri_cachelab.h: what the workbench asks of caches and of the machine. A library of its own beside the engine, which needs none of
 * it: libcolibri stays as small as it is. Same rules: never prints, never exits, only libc, libm and pthread. */
#ifndef COLIBRI_CACHELAB_H
#define COLIBRI_CACHELAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri.h" /* the types of a pass' stages; no function of it is called */

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. requests --------------------------------------------------------------------------------------------------------- */

/* A key is layer * n_experts + expert, of the layers that share a cache. A piece holds some tokens of a trace, of all these layers.
 * Slots with -1 request nothing; so do those that name an expert again within its token and layer. All ids must lie below n_experts:
 * whoever fills a piece checks them. */
typedef struct cachelab_piece {
    int64_t n_tokens, first_token;
    const int64_t *passes; /* [n_tokens + 1]: number of the pass of each token, and of the one after the piece (-1: there is none) */
    const int32_t *ids;    /* [n_layers, n_tokens, k] */
    const int32_t *next;   /* the same shape: the pass that asks for the key next, or CACHELAB_NEVER; NULL where no policy looks ahead */
    const int32_t *ahead;  /* [n_layers, n_tokens, n_ahead]: fetched ahead for the token; NULL: nothing is */
    const uint8_t *late;   /* the same shape: 1 where the fetch came after the expert was needed; NULL: none did */
} cachelab_piece;

#define CACHELAB_NEVER INT32_MAX

/* For a piece of one layer, read backwards from the last to the first: the pass that asks for each id next. last and next [n_experts]
 * carry over; both begin as CACHELAB_NEVER. In the end `last` holds the pass of each expert's first use. */
void cachelab_next_uses(const int32_t *ids, const int64_t *passes, int64_t n_tokens, int64_t k, int32_t *last, int32_t *next,
                        int32_t *out);

/* ---- 2. reuse distances -------------------------------------------------------------------------------------------------- */

typedef struct cachelab_recency cachelab_recency;

/* NULL when there is no memory. */
cachelab_recency *cachelab_recency_new(int32_t n_layers, int32_t n_experts, int32_t k);
void cachelab_recency_free(cachelab_recency *recency);

/* Every token is a set of its own, layer after layer. How many other keys were used since the last use of the same one, as the set
 * begins: depths [n_layers, n_tokens, k], -1 at a first use, -2 where there is no request; or NULL. counts [keys + 1] grows by one at
 * the distance of each request, first uses in the last place; or NULL. */
void cachelab_recency_feed(cachelab_recency *recency, const int32_t *ids, int64_t n_tokens, int32_t *depths, int64_t *counts);

/* ---- 3. policies --------------------------------------------------------------------------------------------------------- */

/* What each does is said in colibri_lab/cache/policies.py, in this order. */
typedef enum cachelab_policy {
    CACHELAB_LRU,
    CACHELAB_LFU,
    CACHELAB_FIFO,
    CACHELAB_CLOCK,
    CACHELAB_SLRU,
    CACHELAB_LFRU,
    CACHELAB_LRU_K,
    CACHELAB_ARC,
    CACHELAB_LEAST_STALE,
    CACHELAB_STATIC,
    CACHELAB_BELADY,
    CACHELAB_N_POLICIES
} cachelab_policy;

typedef struct cachelab_setup {
    cachelab_policy policy;
    int32_t n_layers, n_experts; /* layers that share the cache; n_layers * n_experts is at most CACHELAB_MAX_KEYS */
    int32_t k, n_ahead;          /* slots of a token and layer; those of its prefetch */
    const int64_t *sizes;        /* [keys] room that each takes; NULL: 1 */
    const int64_t *bytes;        /* [keys] what it costs to read each; NULL: 1 */
    const int64_t *uses;         /* [keys] uses in a profile: for CACHELAB_STATIC alone. All three are read while the cache lives */
    const int32_t *first;        /* [keys] pass of the first use: for CACHELAB_BELADY alone. Copied */
} cachelab_setup;

#define CACHELAB_MAX_KEYS (1 << 24)

/* ---- 4. one pass for all capacities -------------------------------------------------------------------------------------- */

/* The policies that rank all keys alike whatever the capacity: lru, lfu, lru-k, least-stale, belady. The cache of C is then that of
 * C - 1 and one key more (Mattson et al., 1970), so one stack shows all. */
typedef struct cachelab_stack cachelab_stack;

cachelab_stack *cachelab_stack_new(const cachelab_setup *setup); /* NULL: no memory, or a policy that has no stack */
void cachelab_stack_free(cachelab_stack *stack);

/* counts [keys + 1] grows by one at the depth of each request: a cache of C hits the depths below C. First uses: last place. */
void cachelab_stack_feed(cachelab_stack *stack, const cachelab_piece *piece, int64_t *counts);

/* ---- 5. one cache -------------------------------------------------------------------------------------------------------- */

typedef struct cachelab_sim cachelab_sim;

/* First uses: of the misses, those of a key that was never asked for before. */
enum { CACHELAB_REQUESTS, CACHELAB_PIN_HITS, CACHELAB_POLICY_HITS, CACHELAB_PREFETCH_HITS, CACHELAB_LATE_HITS, CACHELAB_MISSES,
       CACHELAB_FIRST_USES, CACHELAB_NOT_KEPT, CACHELAB_PREFETCHED, CACHELAB_WASTED, CACHELAB_BYTES_READ, CACHELAB_N_COUNTS };

typedef enum cachelab_outcome { CACHELAB_PIN, CACHELAB_HIT, CACHELAB_PREFETCH, CACHELAB_LATE, CACHELAB_MISS } cachelab_outcome;

typedef struct cachelab_event {
    int64_t token;
    int32_t slot, key;
    int32_t outcome, kept; /* kept: whether the key is there when its set ends */
    int32_t evicted, n_evicted; /* the first key that went for it, or -1; how many went */
} cachelab_event;

/* limit: in units of `sizes`; places: the same in experts (ARC counts those). NULL when there is no memory. */
cachelab_sim *cachelab_sim_new(const cachelab_setup *setup, int64_t limit, int64_t places);
void cachelab_sim_free(cachelab_sim *sim);

/* A key that is there before the first request; false when it finds no room. A pinned one stays for good. */
bool cachelab_sim_place(cachelab_sim *sim, int32_t key, bool pinned);

/* From now on: what no longer fits goes by the policy's own order. The limit is at least what is pinned. */
void cachelab_sim_resize(cachelab_sim *sim, int64_t limit, int64_t places);

/* events: room for those of the layer `watched` in this piece (n_experts + n_tokens * k of them), or NULL. Returns how many. */
int64_t cachelab_sim_feed(cachelab_sim *sim, const cachelab_piece *piece, int32_t watched, cachelab_event *events);

int64_t cachelab_sim_used(const cachelab_sim *sim);   /* units taken */
int64_t cachelab_sim_pinned(const cachelab_sim *sim); /* those of them for good */
bool cachelab_sim_holds(const cachelab_sim *sim, int32_t key);
void cachelab_sim_counts(const cachelab_sim *sim, int64_t *counts); /* [n_layers, 2 (prefill, decode), CACHELAB_N_COUNTS] */

/* ---- 6. pages: which of a mapped file are in memory, and how they come and go -------------------------------------------- */

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

/* ---- 7. counters: what the CPU counts of itself -------------------------------------------------------------------------- */

enum {
    CACHELAB_CYCLES = 0,
    CACHELAB_INSTRUCTIONS,
    CACHELAB_L1D_MISSES,
    CACHELAB_LLC_MISSES,
    CACHELAB_DTLB_MISSES,
    CACHELAB_COUNTERS
};

const char *cachelab_counter_name(int counter); /* "cycles", "instructions", "l1d_misses", "llc_misses", "dtlb_misses" */

/* What a counter said: events in user mode, and the nanoseconds in which it was to count and really did. These differ when the CPU
 * has fewer counters than are asked for and the system takes turns. */
typedef struct cachelab_count {
    uint64_t value, enabled, running;
} cachelab_count;

/* The events of the whole time, as if the counter had run all of it; NaN when it never ran. */
double cachelab_scaled(cachelab_count count);

typedef struct cachelab_counters {
    int files[CACHELAB_COUNTERS];  /* -1 where the counter cannot be had */
    int errors[CACHELAB_COUNTERS]; /* then the errno that says why */
} cachelab_counters;

/* Opens one event, as perf_event_open does: a file from which a cachelab_count can be read, or -1 and errno. */
typedef int (*cachelab_open_event)(uint32_t type, uint64_t config);
int cachelab_open_system_event(uint32_t type, uint64_t config);

/* Counts the calling thread and every thread that it makes from now on: open them before the session whose threads they are to
 * count. */
void cachelab_counters_open(cachelab_counters *counters, cachelab_open_event open_event);
void cachelab_counters_close(cachelab_counters *counters);
void cachelab_counters_read(const cachelab_counters *counters, cachelab_count out[CACHELAB_COUNTERS]); /* 0 where there is none */

/* In words, why an event cannot be had; `paranoid` is what kernel.perf_event_paranoid says, -100 when it cannot be read. */
enum { CACHELAB_REASON_SIZE = 160 };
void cachelab_counter_reason(int error, int paranoid, char out[CACHELAB_REASON_SIZE]);
int cachelab_perf_event_paranoid(void);

/* ---- 8. stages: what each stage of a pass took --------------------------------------------------------------------------- */

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

/* ---- 9. work: what the stages compute and touch -------------------------------------------------------------------------- */

/* Operations are floating-point ones; a multiply-add is two. An RMS norm of w channels is 4w, a softmax of w entries 4w (subtract,
 * exp, add, divide) and 1 more for a scale, a rotation 6 for each pair of channels, silu(a) * b 4 and a sigmoid 3. Comparisons
 * (top-k), copies and the rotary table count as none.
 *
 * Bytes are those of every value that a stage reads or writes, each value once however often it is read: the weights, the rows that
 * come in, the rows in between, the rows that go out, and the keys and values in reach. The rows of attention weights are left out:
 * a thread uses one of them again and again. Rows are float32, weights as they are stored. */
typedef struct cachelab_amount {
    double flops, bytes;
} cachelab_amount;

typedef struct cachelab_sizes {
    int64_t n_layers, vocab, hidden;
    int64_t heads, key_heads, head_dim;
    int64_t n_experts, top_k;
    int64_t expert_width, shared_width, dense_width; /* of one expert, the shared expert, dense layers; 0: there is none */
} cachelab_sizes;

typedef struct cachelab_work cachelab_work;

cachelab_work *cachelab_work_create(const cachelab_sizes *sizes); /* NULL: no memory */
void cachelab_work_free(cachelab_work *work);                     /* accepts NULL */

/* Then every layer (window: keys that a query sees, 0 = all), and every weight by its canonical name (colibri.h, 3). */
void cachelab_work_layer(cachelab_work *work, int64_t layer, bool is_moe, bool has_shared, int64_t window);
void cachelab_work_weight(cachelab_work *work, const char *name, int64_t n_elements, int64_t n_bytes);

/* Adds to out [n_layers + 1, CACHELAB_STAGES], whose last row is what lies outside layers, what a tile of the tokens start ..
 * start + n - 1 takes in a session that does not keep logits. `last`: it ends its pass, so the logits of one token are computed. ids
 * [n_layers]: [n, top_k] chosen experts, -1 for none; NULL at dense layers. */
void cachelab_work_tile(const cachelab_work *work, int64_t start, int64_t n, bool last, const int32_t *const *ids,
                        cachelab_amount *out);

/* ---- 10. limits: what the machine can do at best ------------------------------------------------------------------------- */

/* Memory to be read, of which each thread reads some rows. */
typedef struct cachelab_stream {
    const void *data;
    int64_t rows, row_bytes;
} cachelab_stream;

/* Seconds in which `threads` threads (1 to 256) read the streams one after the other. A thread reads 1 to 8 places of its part in
 * turn, and prefetches `ahead` bytes before each (0: it does not). Below 0 when the threads cannot be made. */
double cachelab_read_seconds(const cachelab_stream *ranges, int64_t n_ranges, int threads, int streams, int ahead);

/* `rounds` multiply-adds of each of a dozen vectors, with the instruction set that colibri_isa names (NULL: the widest here), and
 * how many operations that is: two for each element; 0 where it cannot run. The result only keeps them from being left out. */
float cachelab_fma_chains(const char *isa, int64_t rounds, float seed, double *operations);

/* Operations in a second of so many threads together; below 0 when it cannot be run. */
double cachelab_fma_rate(const char *isa, int threads, int64_t rounds);

/* ---- 11. caches and TLBs of a processor ---------------------------------------------------------------------------------- */

/* A set-associative table that evicts what was used least recently: a cache level, whose blocks are lines, or a TLB, whose blocks are
 * pages. Block b = address >> shift belongs to set b % n_sets. */
typedef struct cachelab_table {
    int64_t *tags; /* [n_sets, ways], each set from the latest used on; -1: empty */
    int64_t n_sets, ways;
    int shift;
    int64_t accesses, misses;
} cachelab_table;

/* Empties it and its counts. */
void cachelab_table_clear(cachelab_table *table);

/* Addresses >= 0, one after another: each asks the first table, and the next one when that misses; every table asked then has its
 * block. Nothing is written back, prefetched, or thrown out of one table because another lost it. */
void cachelab_walk(cachelab_table *chain, int64_t n_tables, const int64_t *addresses, int64_t n);

#ifdef __cplusplus
}
#endif

#endif
