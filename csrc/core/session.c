#include "session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../utils/atomics.h"
#include "../utils/instant.h"
#include "../utils/mapguard.h"
#include "capture.h"
#include "forward.h"
#include "stepping.h"

/* ---- creation -------------------------------------------------------------------------------------------------------------- */

/* Bytes that a session leaves free, so that one that takes the most that fits can be used: its blocks are rounded up to whole
 * pages (4 times 4 to 64 KB) and have records on the heap, and whoever looks at it allocates too (Python by 1 MB at a time). */
enum { SPARE = 4 << 20 };

/* Bytes that a plan takes of memory, of all, when its tape lies in a file of file_bytes; more than there is when the file is small. */
static int64_t memory_of(const layout *p, int64_t need, int64_t file_bytes)
{
    return file_bytes == 0 || need < 0 ? need : p->tape_bytes > file_bytes ? -1 : need - p->tape_bytes;
}

/* The most tokens, up to `limit`, whose plan fits into n_bytes and a file (0: none); 0 when not even one does. */
static int64_t tokens_that_fit(const config *c, const bool *kept, int n_threads, int64_t limit, int64_t n_bytes,
                               int64_t file_bytes, layout *scratch)
{
    int64_t fits = 0, above = limit + 1;
    while (above - fits > 1) {
        int64_t middle = fits + (above - fits) / 2;
        int64_t need = memory_of(scratch, layout_plan(c, kept, middle, n_threads, scratch), file_bytes);
        if (need >= 0 && need <= n_bytes)
            fits = middle;
        else
            above = middle;
    }
    return fits;
}

static colibri_status plan_memory(session *s, const bool *kept, int64_t max_tokens, int n_threads, colibri_message *message)
{
    const config *c = &s->model->config;
    int64_t available = memory_available() - SPARE;
    if (available < 0)
        available = 0;
    if (max_tokens < 0 || max_tokens > INT32_MAX)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "max_tokens is %lld; it can be 1 to %ld, or 0 for what fits",
                    (long long)max_tokens, (long)INT32_MAX);
    int64_t file = s->file_bytes;
    if (max_tokens == 0) {
        int64_t limit = c->max_position_embeddings < INT32_MAX ? c->max_position_embeddings : INT32_MAX;
        max_tokens = tokens_that_fit(c, kept, n_threads, limit, available / 2, (file + 1) / 2, &s->layout);
        s->held_by_memory = max_tokens < limit;
        if (max_tokens == 0)
            return fail(message, COLIBRI_ERROR_MEMORY,
                        "a session at this capture needs %lld bytes for one token; half of the %s left is %lld",
                        (long long)layout_plan(c, kept, 1, n_threads, &s->layout), file != 0 ? "disk and memory" : "memory",
                        (long long)(available / 2 + file / 2));
    }
    int64_t need = layout_plan(c, kept, max_tokens, n_threads, &s->layout), tape = file != 0 ? s->layout.tape_bytes : 0;
    if (need >= 0 && tape <= file && need - tape <= available)
        return COLIBRI_OK;
    int64_t fits = tokens_that_fit(c, kept, n_threads, max_tokens, available, file, &s->layout);
    if (need >= 0 && tape > file)
        return fail(message, COLIBRI_ERROR_FILE,
                    "a session of max_tokens=%lld at this capture needs %lld bytes of disk and %lld are left; max_tokens=%lld "
                    "would fit",
                    (long long)max_tokens, (long long)tape, (long long)file, (long long)fits);
    return fail(message, COLIBRI_ERROR_MEMORY,
                "a session of max_tokens=%lld at this capture needs %s%lld bytes and %lld are left; max_tokens=%lld would fit",
                (long long)max_tokens, need < 0 ? "more than " : "", (long long)(need < 0 ? INT64_MAX : need - tape),
                (long long)available, (long long)fits);
}

/* The session's threads and blocks, for the taps marked in kept. */
static colibri_status reserve(session *s, const bool *kept, int64_t max_tokens, colibri_message *message)
{
    size_t n_slots = (size_t)s->model->config.num_hidden_layers * TAP_COUNT;
    colibri_cpus cpus;
    TRY(threads_usable_cpus(&cpus, message));
    bool all = s->threads_asked == 0 || s->threads_asked > cpus.count; /* more would only take turns */
    int n_threads = all ? cpus.count : s->threads_asked;
    s->layout.slots = calloc(n_slots, sizeof *s->layout.slots);
    s->layout.watches = s->boundary.watch != COLIBRI_WATCH_OFF;
    if (s->layout.slots == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for the table of %zu taps", n_slots);
    TRY(machine_init(&s->machine, n_threads, message)); /* before the plan: the stacks of threads take memory too */
    TRY(plan_memory(s, kept, max_tokens, n_threads, message));

    /* A tape in a file has a place once it is mapped; until then no row is written. */
    TRY(block_create(s->file_bytes != 0 ? 0 : s->layout.tape_bytes, BLOCK_HISTORY, s->model, &s->tape, message));
    TRY(block_create(s->layout.scratch_bytes, BLOCK_WORK, s->model, &s->scratch, message));
    s->machine.room = (float *)(void *)(block_data(s->scratch) + s->layout.room);
    s->machine.room_floats = s->layout.room_floats;
    if (s->layout.watches)
        boundary_init(&s->boundary, &s->model->config, n_threads, block_data(s->scratch) + s->layout.tables,
                      block_data(s->scratch) + s->layout.pass_tables, block_data(s->scratch) + s->layout.thread_tables);
    if (boundary_is_on(&s->boundary))
        s->machine.boundary = &s->boundary;
    TRY(block_create(s->layout.logits_bytes, BLOCK_WORK, s->model, &s->logits, message));
    return block_create(s->layout.logits_bytes, BLOCK_WORK, s->model, &s->next_logits, message);
}

/* A copy of what is emulated; n is 0 or all points of all layers. */
static colibri_status copy_emulation(session *s, const colibri_emulation *emulation, size_t n, colibri_message *message)
{
    size_t all = (size_t)s->model->config.num_hidden_layers * POINT_COUNT;
    if (n == 0)
        return COLIBRI_OK;
    if (n != all || emulation == NULL)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "the emulation has %zu entries; this model has %zu, %d points in each layer",
                    emulation == NULL ? 0 : n, all, POINT_COUNT);
    for (size_t i = 0; i < n; i++)
        for (int sums = 0; sums < 2; sums++) {
            int format = (int)(sums ? emulation[i].accumulation : emulation[i].storage.format);
            if (format < COLIBRI_FLOAT32 || format > COLIBRI_FLOAT8_E5M2)
                return fail(message, COLIBRI_ERROR_ARGUMENT,
                            "\"%s\" of layer %zu: format %d does not exist; the formats are 0 to %d",
                            point_kinds[i % POINT_COUNT].path, i / POINT_COUNT, format, COLIBRI_FLOAT8_E5M2);
        }
    s->emulation = malloc(n * sizeof *emulation);
    if (s->emulation == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a session");
    memcpy(s->emulation, emulation, n * sizeof *emulation);
    s->n_emulation = n;
    s->boundary.emulation = s->emulation;
    return COLIBRI_OK;
}

static colibri_status fill(session *s, const colibri_session_options *o, bool *kept, colibri_message *message)
{
    const config *c = &s->model->config;
    static const char *const routing[] = {"routing"};
    if (o->threads < 0 || o->threads > COLIBRI_MAX_THREADS)
        return fail(message, COLIBRI_ERROR_ARGUMENT,
                    "threads is %d; choose 1 to %d, or the default: as many as this process may use", o->threads,
                    COLIBRI_MAX_THREADS);
    if ((int)o->gate_mode < COLIBRI_GATES_MODEL || (int)o->gate_mode > COLIBRI_GATES_RAW_LOGITS)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "gate mode %d does not exist; the modes are 0 to %d", (int)o->gate_mode,
                    COLIBRI_GATES_RAW_LOGITS);
    if (o->file_bytes < 0)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "file_bytes is %lld; a file holds 1 or more", (long long)o->file_bytes);
    if ((int)o->watch < COLIBRI_WATCH_OFF || (int)o->watch > COLIBRI_WATCH_STOP)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "watch %d does not exist; choose 0 (off) to %d (stop)", (int)o->watch,
                    COLIBRI_WATCH_STOP);
    s->file_bytes = o->file_bytes;
    s->boundary.watch = o->watch;
    TRY(copy_emulation(s, o->emulation, o->n_emulation, message));
    s->threads_asked = o->threads;
    s->gates = o->gate_mode == COLIBRI_GATES_MODEL ? c->gate_rule : o->gate_mode;
    TRY(o->n_capture == 0 ? capture_resolve(c, routing, 1, kept, message)
                          : capture_resolve(c, o->capture, o->n_capture, kept, message));
    return reserve(s, kept, o->max_tokens, message);
}

/* The same as `like`, which has all that options can say. */
static colibri_status fill_like(session *s, const session *like, bool *kept, colibri_message *message)
{
    s->threads_asked = like->threads_asked;
    s->gates = like->gates;
    s->held_by_memory = like->held_by_memory;
    s->boundary.watch = like->boundary.watch;
    TRY(copy_emulation(s, like->emulation, like->n_emulation, message));
    for (int64_t i = 0; i < s->model->config.num_hidden_layers * TAP_COUNT; i++)
        kept[i] = like->layout.slots[i].kept;
    return reserve(s, kept, like->layout.max_tokens, message);
}

/* The caller's options may be of an older version (shorter: the rest is default) but not of a newer one. */
static colibri_status read_options(const colibri_session_options *given, colibri_session_options *out, colibri_message *message)
{
    *out = (colibri_session_options){0};
    if (given == NULL)
        return COLIBRI_OK;
    if (given->size < sizeof given->size || given->size > sizeof *out)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "the session options say they have %zu bytes; this library knows %zu",
                    given->size, sizeof *out);
    memcpy(out, given, given->size);
    if (out->n_capture > 0 && out->capture == NULL)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "%zu capture patterns are announced but the list is NULL", out->n_capture);
    return COLIBRI_OK;
}

/* From options, or like another session. */
static colibri_status create(const model_data *model, const colibri_session_options *options, const session *like, session **out,
                             colibri_message *message)
{
    *out = NULL;
    session *s = calloc(1, sizeof *s);
    bool *kept = calloc((size_t)model->config.num_hidden_layers * TAP_COUNT, sizeof *kept);
    if (s == NULL || kept == NULL) {
        free(s);
        free(kept);
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a session");
    }
    s->model = model;
    s->process = getpid();
    colibri_status status = like != NULL ? fill_like(s, like, kept, message) : fill(s, options, kept, message);
    free(kept);
    if (status == COLIBRI_OK)
        *out = s;
    else
        session_free(s);
    return status;
}

colibri_status session_create(const model_data *model, const colibri_session_options *options, session **out,
                              colibri_message *message)
{
    colibri_session_options o;
    *out = NULL;
    TRY(read_options(options, &o, message));
    return create(model, &o, NULL, out, message);
}

colibri_status session_create_like(const session *like, session **out, colibri_message *message)
{
    return create(like->model, NULL, like, out, message);
}

void session_free(session *s)
{
    if (s == NULL)
        return;
    machine_free(&s->machine);
    block_release(s->tape);
    block_release(s->scratch);
    block_release(s->logits);
    block_release(s->next_logits);
    free(s->layout.slots);
    free(s->emulation);
    free(s);
}

/* ---- where rows lie -------------------------------------------------------------------------------------------------------- */

bool session_keeps(const session *s, tap t, int64_t layer)
{
    return layout_slot(&s->layout, &s->model->config, t, layer)->kept;
}

void *session_rows(const session *s, tap t, int64_t layer)
{
    const slot *p = layout_slot(&s->layout, &s->model->config, t, layer);
    int64_t row = 0;
    if (p->kept)
        row = tap_rows_of(t) == ROWS_PASSES   ? s->n_passes
              : tap_rows_of(t) == ROWS_PACKED ? s->tile_first * s->model->config.top_k
                                              : s->tile_first;
    return block_data(p->kept ? s->tape : s->scratch) + p->offset + row * p->row_bytes;
}

int64_t *session_passes(const session *s)
{
    return (int64_t *)(void *)(block_data(s->scratch) + s->layout.passes);
}

/* ---- one thread at a time -------------------------------------------------------------------------------------------------- */

colibri_status session_enter(session *s, colibri_message *message)
{
    if (atomic_exchange(&s->busy, 1) != 0)
        return fail(message, COLIBRI_ERROR_BUSY,
                    atomic_load_acquire(&s->process) == getpid()
                        ? "session busy: another thread is inside it; wait for it, or use a session for each thread"
                        : "session busy: it was in use when this process was forked off, and nobody here will finish "
                          "that; open a new session");
    atomic_store_release(&s->process, getpid());
    return COLIBRI_OK;
}

void session_leave(session *s)
{
    atomic_store_release(&s->busy, 0);
}

colibri_status session_observe(session *s, colibri_observer observer, void *user, colibri_message *message)
{
    TRY(session_enter(s, message));
    s->observer = observer;
    s->observer_user = user;
    session_leave(s);
    return COLIBRI_OK;
}

/* ---- feed ------------------------------------------------------------------------------------------------------------------ */

static colibri_status check_ids(const session *s, const int32_t *ids, int64_t n, colibri_message *message)
{
    int64_t vocab_size = s->model->config.vocab_size;
    if (n < 1 || ids == NULL)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "a pass needs at least one token id, got %lld", (long long)n);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= vocab_size)
            return fail(message, COLIBRI_ERROR_ARGUMENT, "token id %ld at index %lld is outside 0 .. %lld (vocab_size is %lld)",
                        (long)ids[i], (long long)i, (long long)(vocab_size - 1), (long long)vocab_size);
    if (n > s->layout.max_tokens - s->n_tokens)
        return fail(
            message, COLIBRI_ERROR_CAPACITY,
            "no room for %lld more token%s after %lld (max_tokens=%lld%s); %s, or truncate", (long long)n, n == 1 ? "" : "s",
            (long long)s->n_tokens, (long long)s->layout.max_tokens,
            s->held_by_memory ? ", what half of the memory left could hold when the session was opened" : "",
            s->held_by_memory ? "capture less or free memory" : "open a session with a larger max_tokens");
    return COLIBRI_OK;
}

/* The block that the pass will write its logits to: the old one, or a fresh one when somebody still looks at the old one. */
static colibri_status prepare_logits(session *s, colibri_message *message)
{
    block *fresh;
    if (block_references(s->next_logits) == 1)
        return COLIBRI_OK;
    TRY(block_create(s->layout.logits_bytes, BLOCK_WORK, s->model, &fresh, message));
    instant_begin();
    block *old = s->next_logits;
    s->next_logits = fresh;
    instant_end();
    block_release(old);
    return COLIBRI_OK;
}

colibri_status session_check_pass(session *s, const int32_t *ids, int64_t n, colibri_message *message)
{
    TRY(check_no_open_pass(s, message));
    if (block_bytes(s->tape) != s->layout.tape_bytes)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "the tape of this session is to lie in a file, and is not mapped yet");
    TRY(check_ids(s, ids, n, message));
    TRY(model_data_check_files(s->model, message));
    return prepare_logits(s, message);
}

colibri_status session_close_pass(session *s, colibri_message *message)
{
    TRY(model_data_check_files(s->model, message)); /* a weight that changed or was lost under the pass spoils it */
    if (mapguard_lost(block_data(s->tape)))
        return fail(message, COLIBRI_ERROR_FILE,
                    "the file that holds the tape could not take rows: the disk is full, or the file was cut; this session can "
                    "compute no more");
    int64_t *pass = session_passes(s) + 2 * s->n_passes;
    boundary_close_pass(&s->boundary, s->n_passes);
    instant_begin();
    pass[0] = s->pass_start;
    pass[1] = s->pass_start + s->pass_tokens;
    s->n_tokens += s->pass_tokens;
    s->n_passes++;
    block *old = s->logits;
    s->logits = s->next_logits;
    s->next_logits = old;
    s->has_logits = true;
    s->open = false;
    boundary_add_pass(&s->boundary);
    instant_end();
    return COLIBRI_OK;
}

static colibri_status feed(session *s, const int32_t *ids, int64_t n, colibri_progress progress, void *user,
                           colibri_message *message)
{
    TRY(session_check_pass(s, ids, n, message));
    machine_begin(&s->machine, progress, user, 0);
    if (forward(s, ids, n))
        return session_close_pass(s, message);
    char tail[64];
    snprintf(tail, sizeof tail, "the session still has its %lld tokens", (long long)s->n_tokens);
    return s->boundary.found != NULL ? boundary_fail(&s->boundary, tail, message)
                                     : fail(message, COLIBRI_ERROR_INTERRUPTED, "interrupted; %s", tail);
}

colibri_status session_feed(session *s, const int32_t *ids, int64_t n, colibri_progress progress, void *user,
                            colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = feed(s, ids, n, progress, user, message);
    session_leave(s);
    return status;
}

/* ---- questions ------------------------------------------------------------------------------------------------------------- */

void session_length(session *s, int64_t *n_tokens, int64_t *n_passes)
{
    instant_begin();
    *n_tokens = s->n_tokens;
    *n_passes = s->n_passes;
    instant_end();
}

int64_t session_truncations(session *s)
{
    instant_begin();
    int64_t n = s->n_truncations;
    instant_end();
    return n;
}

size_t session_watch(session *s, colibri_watch_row *out, size_t capacity)
{
    instant_begin();
    size_t n = boundary_table(&s->boundary, out, capacity);
    instant_end();
    return n;
}

void session_pass(session *s, int64_t pass, int64_t *start, int64_t *stop)
{
    instant_begin();
    bool exists = pass >= 0 && pass < s->n_passes;
    *start = exists ? session_passes(s)[2 * pass] : 0;
    *stop = exists ? session_passes(s)[2 * pass + 1] : 0;
    instant_end();
}

colibri_session_memory session_memory(session *s)
{
    const layout *p = &s->layout;
    instant_begin();
    int64_t copied = s->copied_bytes;
    instant_end();
    return (colibri_session_memory){.reserved = p->tape_bytes + p->scratch_bytes + 2 * p->logits_bytes,
                                    .tape = p->tape_bytes,
                                    .kv_cache = p->kv_bytes,
                                    .scratch = p->scratch_bytes,
                                    .copied_bytes = copied};
}

void session_blocks(session *s, colibri_block out[COLIBRI_SESSION_BLOCKS])
{
    instant_begin();
    const block *blocks[COLIBRI_SESSION_BLOCKS] = {s->tape, s->scratch, s->logits, s->next_logits};
    for (int i = 0; i < COLIBRI_SESSION_BLOCKS; i++)
        out[i] = block_describe(blocks[i]);
    instant_end();
}
