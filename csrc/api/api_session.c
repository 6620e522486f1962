#include <stdlib.h>

#include "../core/history.h"
#include "../core/views.h"
#include "../utils/mapguard.h"
#include "handles.h"

/* ---- the session ----------------------------------------------------------------------------------------------------------- */

colibri_status colibri_session_create(colibri_model *model, const colibri_session_options *options, colibri_session **session,
                                      colibri_message *message)
{
    if (model == NULL || session == NULL)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "colibri_session_create needs a model and a place for the session");
    *session = NULL;
    colibri_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a session");
    colibri_status status = session_create(model->data, options, &s->inner, message);
    if (status != COLIBRI_OK) {
        free(s);
        return status;
    }
    s->model = model;
    model_add_user(model);
    *session = s;
    return COLIBRI_OK;
}

void colibri_session_release(colibri_session *session)
{
    if (session == NULL)
        return;
    session_free(session->inner);
    model_drop_user(session->model);
    free(session);
}

colibri_status colibri_session_feed(colibri_session *session, const int32_t *ids, int64_t n, colibri_progress progress,
                                    void *user, colibri_message *message)
{
    mapguard_enter();
    colibri_status status = session_feed(session->inner, ids, n, progress, user, message);
    mapguard_leave();
    return status;
}

colibri_status colibri_session_truncate(colibri_session *session, int64_t n_tokens, colibri_message *message)
{
    return session_truncate(session->inner, n_tokens, message);
}

colibri_status colibri_session_map(colibri_session *session, int file, int64_t offset, int64_t n_tokens, colibri_message *message)
{
    mapguard_enter();
    colibri_status status = session_map(session->inner, file, offset, n_tokens, message);
    mapguard_leave();
    return status;
}

bool colibri_session_place(const colibri_session *session, size_t kind, int64_t layer, colibri_tape_place *out)
{
    if (!colibri_session_captures(session, kind, layer))
        return false;
    const slot *p = layout_slot(&session->inner->layout, &session->inner->model->config, (tap)kind, layer);
    *out = (colibri_tape_place){p->offset, p->row_bytes, p->n_rows};
    return true;
}

int64_t colibri_session_length(const colibri_session *session)
{
    int64_t n_tokens, n_passes;
    session_length(session->inner, &n_tokens, &n_passes);
    return n_tokens;
}

int64_t colibri_session_max_tokens(const colibri_session *session)
{
    return session->inner->layout.max_tokens;
}

int64_t colibri_session_pass_count(const colibri_session *session)
{
    int64_t n_tokens, n_passes;
    session_length(session->inner, &n_tokens, &n_passes);
    return n_passes;
}

int64_t colibri_session_truncations(const colibri_session *session)
{
    return session_truncations(session->inner);
}

void colibri_session_pass(const colibri_session *session, int64_t pass, int64_t *start, int64_t *stop)
{
    session_pass(session->inner, pass, start, stop);
}

int colibri_session_threads(const colibri_session *session)
{
    return threads_at_work(session->inner->machine.pool);
}

int colibri_session_threads_asked(const colibri_session *session)
{
    return session->inner->threads_asked;
}

size_t colibri_session_watch(const colibri_session *session, colibri_watch_row *out, size_t capacity)
{
    return session_watch(session->inner, out, capacity);
}

colibri_watch colibri_session_watches(const colibri_session *session)
{
    return session->inner->boundary.watch;
}

const colibri_point_kind *colibri_point_kinds(size_t *count)
{
    if (count != NULL)
        *count = POINT_COUNT;
    return point_kinds;
}

colibri_session_memory colibri_session_memory_use(const colibri_session *session)
{
    return session_memory(session->inner);
}

void colibri_session_blocks(const colibri_session *session, colibri_block out[COLIBRI_SESSION_BLOCKS])
{
    session_blocks(session->inner, out);
}

/* ---- leases ---------------------------------------------------------------------------------------------------------------- */

colibri_status lease_create(colibri_model *model, block *held, colibri_lease **out, colibri_message *message)
{
    colibri_lease *lease = malloc(sizeof *lease);
    if (lease == NULL) {
        block_release(held);
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a lease");
    }
    *lease = (colibri_lease){held, model};
    model_add_user(model);
    *out = lease;
    return COLIBRI_OK;
}

colibri_lease *colibri_model_lease(colibri_model *model)
{
    colibri_lease *lease = NULL;
    (void)lease_create(model, NULL, &lease, NULL); /* stays NULL when memory is short */
    return lease;
}

void colibri_lease_release(colibri_lease *lease)
{
    if (lease == NULL)
        return;
    block_release(lease->held);
    model_drop_user(lease->model);
    free(lease);
}

void colibri_lease_range(const colibri_lease *lease, const void **data, int64_t *n_bytes)
{
    *data = lease->held != NULL ? block_data(lease->held) : NULL;
    *n_bytes = lease->held != NULL ? block_bytes(lease->held) : 0;
}

/* ---- taps ------------------------------------------------------------------------------------------------------------------ */

const colibri_tap_kind *colibri_tap_kinds(size_t *count)
{
    if (count != NULL)
        *count = TAP_COUNT;
    return tap_kinds;
}

colibri_status colibri_session_tap(colibri_session *session, size_t kind, int64_t layer, int64_t expert, int64_t pass,
                                   colibri_array *array, colibri_lease **lease, colibri_message *message)
{
    block *held;
    TRY(session_tap(session->inner, kind, layer, expert, pass, array, &held, message));
    return lease_create(session->model, held, lease, message);
}

bool colibri_session_captures(const colibri_session *session, size_t kind, int64_t layer)
{
    return tap_check(&session->inner->model->config, kind, layer, 0, NULL) == COLIBRI_OK &&
           session_keeps(session->inner, (tap)kind, layer);
}

colibri_status colibri_session_logits(colibri_session *session, colibri_array *array, colibri_lease **lease,
                                      colibri_message *message)
{
    block *held;
    TRY(session_logits(session->inner, array, &held, message));
    return lease_create(session->model, held, lease, message);
}
