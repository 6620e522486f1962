/* stepping.h: a pass that runs stage by stage. Between two stages it is open: its rows lie where stages left them, and what
 * stands there is what the next stage reads (open_rows.h). It has one tile. */
#ifndef COLIBRI_CORE_STEPPING_H
#define COLIBRI_CORE_STEPPING_H

#include "session.h"

colibri_status session_begin(session *s, const int32_t *ids, int64_t n, colibri_message *message);
colibri_status session_step(session *s, colibri_progress progress, void *user, colibri_place *done, colibri_message *message);
colibri_status session_route_again(session *s, colibri_gate_mode gates, int64_t k, int64_t first, int64_t count, bool keep_ids,
                                   colibri_message *message);

bool session_next(session *s, colibri_place *next);                    /* any thread */
bool session_open_pass(session *s, int64_t *start, int64_t *stop);     /* any thread */

#define PLACE_TEXT_SIZE 64
const char *place_text(colibri_place p, char out[PLACE_TEXT_SIZE]); /* "layer 3, expert 5"; returns out */

colibri_status check_no_open_pass(const session *s, colibri_message *message); /* BUSY */
colibri_status check_open_pass(const session *s, colibri_message *message);    /* ARGUMENT */

#endif
