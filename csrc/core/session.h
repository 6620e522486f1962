/* session.h: one timeline of tokens over one model: its tape, its working memory, and the tile that is being computed.
 *
 * Readers on other threads (taps, lengths) see closed rows only. What they see is n_tokens, n_passes and the current blocks;
 * these change within one instant (instant.h), when a pass ends or rows are abandoned. Everything else belongs to the thread that
 * holds `busy`. */
#ifndef COLIBRI_CORE_SESSION_H
#define COLIBRI_CORE_SESSION_H

#include <sys/types.h>

#include "../model/weights.h"
#include "../utils/memory.h"
#include "layout.h"
#include "machine.h"

typedef struct session {
    const model_data *model; /* kept alive by the owner of the session */
    layout layout;
    machine machine;
    colibri_gate_mode gates; /* as applied; never COLIBRI_GATES_MODEL */
    int busy;                /* atomic: a thread is inside */
    pid_t process;           /* atomic: that of who came in last; in a child of it, nobody is left to finish what was going on */
    int threads_asked;       /* 0: as many as the process may use */
    bool held_by_memory;  /* max_tokens is what memory allowed, not what the model or the caller did */

    /* The tile: tokens first .. first + n - 1 of the pass start .. start + pass_tokens - 1. */
    int64_t pass_start, pass_tokens;
    int64_t tile_first, tile_tokens;
    block *scratch;
    block *next_logits;      /* [V] the pass in progress writes here; nobody else sees it */

    /* What readers see, within an instant. */
    block *tape;
    block *logits;           /* [V] of the last token of the last pass */
    bool has_logits;         /* false before the first pass and after rows were abandoned */
    int64_t n_tokens, n_passes;
    int64_t n_truncations;   /* how often rows were abandoned */
    int64_t copied_bytes;
} session;

colibri_status session_create(const model_data *model, const colibri_session_options *options, session **out,
                              colibri_message *message);
void session_free(session *s); /* accepts NULL; blocks with leases live on */

colibri_status session_feed(session *s, const int32_t *ids, int64_t n, colibri_progress progress, void *user,
                            colibri_message *message);
colibri_status session_truncate(session *s, int64_t n_tokens, colibri_message *message);

void session_length(session *s, int64_t *n_tokens, int64_t *n_passes);
int64_t session_truncations(session *s);
void session_pass(session *s, int64_t pass, int64_t *start, int64_t *stop); /* 0, 0 when there is no such pass */
colibri_session_memory session_memory(session *s);
void session_blocks(session *s, colibri_block out[COLIBRI_SESSION_BLOCKS]);

/* For stages: the rows of a tap that belong to the tile (ROWS_PASSES: to the pass in progress), wherever they lie. */
void *session_rows(const session *s, tap t, int64_t layer);
bool session_keeps(const session *s, tap t, int64_t layer);
int64_t *session_passes(const session *s); /* [max_tokens, 2] start, stop */

#endif
