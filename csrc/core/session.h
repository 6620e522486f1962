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
#include "boundary.h"
#include "layout.h"
#include "machine.h"

typedef struct session {
    const model_data *model; /* kept alive by the owner of the session */
    layout layout;
    machine machine;
    boundary boundary;       /* its counts of closed passes: within an instant */
    colibri_emulation *emulation; /* [num_hidden_layers, POINT_COUNT] or NULL */
    size_t n_emulation;
    colibri_gate_mode gates; /* as applied; never COLIBRI_GATES_MODEL */
    int busy;                /* atomic: a thread is inside */
    pid_t process;           /* atomic: that of who came in last; in a child of it, nobody is left to finish what was going on */
    int threads_asked;       /* 0: as many as the process may use */
    bool held_by_memory;  /* max_tokens is what memory allowed, not what the model or the caller did */
    int64_t file_bytes;      /* not 0: the tape lies in a file that has room for so much of it */

    /* The tile: tokens first .. first + n - 1 of the pass start .. start + pass_tokens - 1. */
    int64_t pass_start, pass_tokens;
    int64_t tile_first, tile_tokens;
    const int32_t *tile_ids; /* [tile_tokens] */
    block *scratch;
    block *next_logits;      /* [V] the pass in progress writes here; nobody else sees it */

    /* What readers see, within an instant. */
    block *tape;
    block *logits;           /* [V] of the last token of the last pass */
    bool has_logits;         /* false before the first pass and after rows were abandoned */
    int64_t n_tokens, n_passes;
    int64_t n_truncations;   /* how often rows were abandoned */
    int64_t copied_bytes;
    bool open;               /* a stepped pass (stepping.h) stands between two stages, before `next` */
    colibri_place next;

    colibri_observer observer; /* told of every stage; NULL: nobody */
    void *observer_user;

    bool began_next;         /* that stage was interrupted: what it writes is no longer what it was */
    bool shown;              /* somebody was given a view of open rows */
} session;

colibri_status session_create(const model_data *model, const colibri_session_options *options, session **out,
                              colibri_message *message);
colibri_status session_create_like(const session *like, session **out, colibri_message *message); /* same options, no rows */
void session_free(session *s); /* accepts NULL; blocks with leases live on */

colibri_status session_feed(session *s, const int32_t *ids, int64_t n, colibri_progress progress, void *user,
                            colibri_message *message);

colibri_status session_observe(session *s, colibri_observer observer, void *user, colibri_message *message);

/* For whoever changes a session: BUSY when another thread is inside. */
colibri_status session_enter(session *s, colibri_message *message);
void session_leave(session *s);

/* How a pass begins and ends, stepped or not: ids are checked and there is room for them and for logits nobody looks at; its rows
 * close, all at once for every reader, unless a weight changed under it. */
colibri_status session_check_pass(session *s, const int32_t *ids, int64_t n, colibri_message *message);
colibri_status session_close_pass(session *s, colibri_message *message);

void session_length(session *s, int64_t *n_tokens, int64_t *n_passes);
int64_t session_truncations(session *s);
size_t session_watch(session *s, colibri_watch_row *out, size_t capacity);
void session_pass(session *s, int64_t pass, int64_t *start, int64_t *stop); /* 0, 0 when there is no such pass */
colibri_session_memory session_memory(session *s);
void session_blocks(session *s, colibri_block out[COLIBRI_SESSION_BLOCKS]);

/* For stages: the rows of a tap that belong to the tile (ROWS_PASSES: to the pass in progress), wherever they lie. */
void *session_rows(const session *s, tap t, int64_t layer);
bool session_keeps(const session *s, tap t, int64_t layer);
int64_t *session_passes(const session *s); /* [max_tokens, 2] start, stop */

#endif
