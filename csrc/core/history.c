#include "history.h"

#include <string.h>

#include "../utils/instant.h"
#include "stepping.h"

/* Copies the first rows of every kept tap into a fresh tape; returns the bytes copied. */
static int64_t copy_rows(const session *s, block *fresh, int64_t n_tokens, int64_t n_passes)
{
    const config *c = &s->model->config;
    int64_t copied = 0;
    for (int64_t i = 0; i < c->num_hidden_layers * TAP_COUNT; i++) {
        const slot *p = &s->layout.slots[i];
        tap t = (tap)(i % TAP_COUNT);
        if (!p->kept)
            continue;
        int64_t n_blocks =
            tap_rows_of(t) == ROWS_HEADS ? c->num_attention_heads : 1; /* [heads, max_tokens, max_tokens] or [rows, ...] */
        int64_t n_rows = tap_rows_of(t) == ROWS_PASSES   ? n_passes
                         : tap_rows_of(t) == ROWS_PACKED ? n_tokens * c->top_k
                                                         : n_tokens;
        for (int64_t b = 0; b < n_blocks; b++) {
            int64_t offset = p->offset + b * (p->n_rows / n_blocks) * p->row_bytes;
            memcpy(block_data(fresh) + offset, block_data(s->tape) + offset, (size_t)(n_rows * p->row_bytes));
            copied += n_rows * p->row_bytes;
        }
    }
    return copied;
}

/* How many passes the first n_tokens tokens are; ARGUMENT when they end within one. */
static colibri_status count_passes(const session *s, int64_t n_tokens, int64_t *n_passes, colibri_message *message)
{
    const int64_t *passes = session_passes(s);
    int64_t n = 0;
    while (n < s->n_passes && passes[2 * n + 1] <= n_tokens)
        n++;
    int64_t stop = n > 0 ? passes[2 * n - 1] : 0;
    *n_passes = n;
    if (n_tokens == stop)
        return COLIBRI_OK;
    return fail(message, COLIBRI_ERROR_ARGUMENT,
                "cannot keep %lld of %lld tokens: no pass ends there; the nearest before is %lld", (long long)n_tokens,
                (long long)s->n_tokens, (long long)stop);
}

/* Within an instant: all rows from n_tokens on are gone, also those of a pass that is open. */
static void keep_only(session *s, int64_t n_tokens, int64_t n_passes)
{
    if (n_tokens < s->n_tokens) {
        s->n_truncations++;
        s->has_logits = false;
    }
    if (n_passes < s->n_passes)
        boundary_use_sum(&s->boundary);
    s->n_tokens = n_tokens;
    s->n_passes = n_passes;
    s->open = false;
}

/* Rows are abandoned in place when nobody looks; a reader that comes a moment later sees only the kept ones. */
static bool keep_in_place(session *s, int64_t n_tokens, int64_t n_passes)
{
    instant_begin();
    bool in_place = block_references(s->tape) == 1 || (n_tokens == s->n_tokens && !(s->open && s->shown));
    if (in_place)
        keep_only(s, n_tokens, n_passes);
    instant_end();
    return in_place;
}

/* The session goes on in a fresh block with a copy of the kept rows; who holds a lease on the old one has it alone. */
static void go_on_in(session *s, block *fresh, int64_t n_tokens, int64_t n_passes)
{
    int64_t copied = copy_rows(s, fresh, n_tokens, n_passes);
    instant_begin();
    block *old = s->tape;
    s->tape = fresh;
    keep_only(s, n_tokens, n_passes);
    s->copied_bytes += copied;
    instant_end();
    block_release(old);
}

static colibri_status keep_copied(session *s, int64_t n_tokens, int64_t n_passes, colibri_message *message)
{
    block *fresh;
    if (s->file_bytes != 0)
        return fail(message, COLIBRI_ERROR_FILE, "views hold the file of this tape: map the session to another");
    TRY(block_create(s->layout.tape_bytes, BLOCK_HISTORY, s->model, &fresh, message));
    go_on_in(s, fresh, n_tokens, n_passes);
    return COLIBRI_OK;
}

static colibri_status keep(session *s, int64_t n_tokens, colibri_message *message)
{
    int64_t n_passes;
    TRY(count_passes(s, n_tokens, &n_passes, message));
    if (n_passes < s->n_passes)
        boundary_sum(&s->boundary, n_passes, n_tokens);
    return keep_in_place(s, n_tokens, n_passes) ? COLIBRI_OK : keep_copied(s, n_tokens, n_passes, message);
}

colibri_status session_truncate(session *s, int64_t n_tokens, colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = keep(s, n_tokens, message);
    session_leave(s);
    return status;
}

colibri_status session_abandon(session *s, colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = keep(s, s->n_tokens, message);
    session_leave(s);
    return status;
}

colibri_status session_move(session *s, colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = check_no_open_pass(s, message);
    if (status == COLIBRI_OK && block_references(s->tape) > 1)
        status = keep_copied(s, s->n_tokens, s->n_passes, message);
    session_leave(s);
    return status;
}

static colibri_status map_rows(session *s, int file, int64_t offset, int64_t n_tokens, colibri_message *message)
{
    int64_t n_passes;
    block *fresh;
    if (s->file_bytes == 0)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "this session was made to lie in memory: its options say no file_bytes");
    TRY(count_passes(s, n_tokens, &n_passes, message));
    TRY(block_of_file(s->layout.tape_bytes, file, offset, s->model, &fresh, message));
    if (n_passes < s->n_passes)
        boundary_sum(&s->boundary, n_passes, n_tokens);
    go_on_in(s, fresh, n_tokens, n_passes);
    return COLIBRI_OK;
}

colibri_status session_map(session *s, int file, int64_t offset, int64_t n_tokens, colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = map_rows(s, file, offset, n_tokens, message);
    session_leave(s);
    return status;
}

static colibri_status fork_rows(session *s, int64_t n_tokens, session **out, colibri_message *message)
{
    int64_t n_passes;
    session *f;
    TRY(count_passes(s, n_tokens, &n_passes, message));
    TRY(session_create_like(s, &f, message));
    f->copied_bytes = copy_rows(s, f->tape, n_tokens, n_passes);
    f->n_tokens = n_tokens;
    f->n_passes = n_passes;
    memcpy(session_passes(f), session_passes(s), (size_t)(2 * n_passes) * sizeof(int64_t));
    boundary_copy(&f->boundary, &s->boundary, n_passes, n_tokens);
    f->has_logits = s->has_logits && n_tokens == s->n_tokens;
    if (f->has_logits)
        memcpy(block_data(f->logits), block_data(s->logits), (size_t)s->layout.logits_bytes);
    *out = f;
    return COLIBRI_OK;
}

colibri_status session_fork(session *s, int64_t n_tokens, session **out, colibri_message *message)
{
    *out = NULL;
    TRY(session_enter(s, message));
    colibri_status status = fork_rows(s, n_tokens, out, message);
    session_leave(s);
    return status;
}
