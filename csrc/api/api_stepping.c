#include <stdlib.h>

#include "../core/history.h"
#include "../core/open_rows.h"
#include "../core/stepping.h"
#include "../utils/mapguard.h"
#include "handles.h"

colibri_status colibri_session_observe(colibri_session *session, colibri_observer observer, void *user, colibri_message *message)
{
    return session_observe(session->inner, observer, user, message);
}

colibri_status colibri_session_begin(colibri_session *session, const int32_t *ids, int64_t n, colibri_message *message)
{
    return session_begin(session->inner, ids, n, message);
}

colibri_status colibri_session_step(colibri_session *session, colibri_progress progress, void *user, colibri_place *done,
                                    colibri_message *message)
{
    mapguard_enter();
    colibri_status status = session_step(session->inner, progress, user, done, message);
    mapguard_leave();
    return status;
}

bool colibri_session_next(const colibri_session *session, colibri_place *next)
{
    return session_next(session->inner, next);
}

bool colibri_session_open_pass(const colibri_session *session, int64_t *start, int64_t *stop)
{
    return session_open_pass(session->inner, start, stop);
}

colibri_status colibri_session_abandon(colibri_session *session, colibri_message *message)
{
    return session_abandon(session->inner, message);
}

colibri_status colibri_session_open_tap(colibri_session *session, size_t kind, int64_t layer, int64_t expert,
                                        colibri_array *array, colibri_lease **lease, colibri_message *message)
{
    block *held;
    TRY(session_open_rows(session->inner, kind, layer, expert, false, array, &held, message));
    return lease_create(session->model, held, lease, message);
}

colibri_status colibri_session_open_edit(colibri_session *session, size_t kind, int64_t layer, int64_t expert,
                                         colibri_array *array, colibri_lease **lease, colibri_message *message)
{
    block *held;
    TRY(session_open_rows(session->inner, kind, layer, expert, true, array, &held, message));
    return lease_create(session->model, held, lease, message);
}

colibri_status colibri_session_open_write(colibri_session *session, size_t kind, int64_t layer, int64_t expert,
                                          const colibri_array *rows, colibri_message *message)
{
    return session_open_write(session->inner, kind, layer, expert, rows, message);
}

colibri_status colibri_session_route_again(colibri_session *session, colibri_gate_mode gate_mode, int64_t k, int64_t first,
                                           int64_t count, bool keep_ids, colibri_message *message)
{
    return session_route_again(session->inner, gate_mode, k, first, count, keep_ids, message);
}

colibri_status colibri_session_move(colibri_session *session, colibri_message *message)
{
    return session_move(session->inner, message);
}

colibri_status colibri_session_fork(colibri_session *session, int64_t n_tokens, colibri_session **fork, colibri_message *message)
{
    *fork = NULL;
    colibri_session *f = calloc(1, sizeof *f);
    if (f == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a session");
    colibri_status status = session_fork(session->inner, n_tokens, &f->inner, message);
    if (status != COLIBRI_OK) {
        free(f);
        return status;
    }
    f->model = session->model;
    model_add_user(f->model);
    *fork = f;
    return COLIBRI_OK;
}
