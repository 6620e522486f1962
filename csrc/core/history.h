/* history.h: what happens to rows that are there: they are abandoned, copied into another session, or moved from under a view.
 *
 * Abandoned rows that somebody holds a lease on are not written again: the session leaves the block to them and goes on in a
 * fresh one, or says that it needs another file when its tape lies in one. */
#ifndef COLIBRI_CORE_HISTORY_H
#define COLIBRI_CORE_HISTORY_H

#include "session.h"

colibri_status session_truncate(session *s, int64_t n_tokens, colibri_message *message);
colibri_status session_abandon(session *s, colibri_message *message);
colibri_status session_move(session *s, colibri_message *message);
colibri_status session_map(session *s, int file, int64_t offset, int64_t n_tokens, colibri_message *message);
colibri_status session_fork(session *s, int64_t n_tokens, session **out, colibri_message *message);

#endif
