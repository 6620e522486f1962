#include "stepping.h"

#include <stdio.h>
#include <string.h>

#include "../utils/instant.h"
#include "forward.h"
#include "stages.h"

/* ---- places ---------------------------------------------------------------------------------------------------------------- */

const char *colibri_stage_name(colibri_stage stage)
{
    static const char names[][12] = {"embed",  "attention",  "router", "dispatcher", "expert", "shared",
                                     "aggregator", "mlp", "residual", "norm",       "logits", "none"};
    return names[stage >= COLIBRI_STAGE_EMBED && stage < COLIBRI_STAGE_NONE ? stage : COLIBRI_STAGE_NONE];
}

const char *place_text(colibri_place p, char out[PLACE_TEXT_SIZE])
{
    const char *stage = colibri_stage_name(p.stage);
    if (p.layer < 0)
        snprintf(out, PLACE_TEXT_SIZE, "%s", stage);
    else if (p.expert < 0)
        snprintf(out, PLACE_TEXT_SIZE, "layer %lld, %s", (long long)p.layer, stage);
    else
        snprintf(out, PLACE_TEXT_SIZE, "layer %lld, expert %lld", (long long)p.layer, (long long)p.expert);
    return out;
}

colibri_status check_no_open_pass(const session *s, colibri_message *message)
{
    char text[PLACE_TEXT_SIZE];
    if (!s->open)
        return COLIBRI_OK;
    return fail(message, COLIBRI_ERROR_BUSY, "a pass is open before %s: finish or abandon it", place_text(s->next, text));
}

colibri_status check_open_pass(const session *s, colibri_message *message)
{
    return s->open ? COLIBRI_OK : fail(message, COLIBRI_ERROR_ARGUMENT, "no pass is open: begin one");
}

/* Where an expert stands in the order of a pass, there stands each expert that has rows. */
static colibri_place next_place(const session *s, colibri_place p)
{
    int64_t n_experts = s->model->config.num_experts;
    colibri_place next = p.stage == COLIBRI_STAGE_EXPERT ? p : place_after(s, p);
    if (next.stage != COLIBRI_STAGE_EXPERT)
        return next;
    const int64_t *offsets = session_rows(s, TAP_DISPATCH_OFFSETS, next.layer);
    for (int64_t e = next.expert + 1; e < n_experts; e++)
        if (offsets[e + 1] > offsets[e])
            return (colibri_place){COLIBRI_STAGE_EXPERT, next.layer, e};
    return place_after(s, next);
}

static void go_to(session *s, colibri_place next)
{
    instant_begin();
    s->open = true;
    s->next = next;
    instant_end();
    s->began_next = false;
}

bool session_next(session *s, colibri_place *next)
{
    instant_begin();
    bool open = s->open;
    *next = open ? s->next : (colibri_place){COLIBRI_STAGE_NONE, -1, -1};
    instant_end();
    return open;
}

bool session_open_pass(session *s, int64_t *start, int64_t *stop)
{
    instant_begin();
    bool open = s->open;
    *start = open ? s->n_tokens : 0;
    *stop = open ? s->n_tokens + s->pass_tokens : 0;
    instant_end();
    return open;
}

/* ---- begin ----------------------------------------------------------------------------------------------------------------- */

static colibri_status begin(session *s, const int32_t *ids, int64_t n, colibri_message *message)
{
    TRY(session_check_pass(s, ids, n, message));
    if (n > s->layout.tile_tokens)
        return fail(message, COLIBRI_ERROR_ARGUMENT,
                    "a stepped pass of %lld tokens is larger than one tile, %lld at this capture: capture \"moe\" or \"all\" has "
                    "no such limit, or take a smaller chunk",
                    (long long)n, (long long)s->layout.tile_tokens);
    int32_t *own = (int32_t *)(void *)(block_data(s->scratch) + s->layout.ids);
    memcpy(own, ids, (size_t)n * sizeof *ids);
    s->pass_start = s->tile_first = s->n_tokens;
    s->pass_tokens = s->tile_tokens = n;
    s->tile_ids = own;
    s->shown = false;
    boundary_begin_pass(&s->boundary);
    go_to(s, first_place());
    return COLIBRI_OK;
}

colibri_status session_begin(session *s, const int32_t *ids, int64_t n, colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = begin(s, ids, n, message);
    session_leave(s);
    return status;
}

/* ---- step ------------------------------------------------------------------------------------------------------------------ */

/* Somebody may have edited the expert ids of the tokens first .. first + n - 1 of the open pass. */
static colibri_status check_choices(const session *s, int64_t layer, int64_t first, int64_t n, colibri_message *message)
{
    int64_t k = s->model->config.top_k, n_experts = s->model->config.num_experts;
    for (int64_t t = first; t < first + n; t++) {
        const int32_t *ids = (const int32_t *)session_rows(s, TAP_EXPERT_IDS, layer) + t * k;
        long long token = s->tile_first + t, last = n_experts - 1;
        for (int64_t i = 0; i < k; i++) {
            int64_t twin = 0;
            while (twin < i && (ids[twin] != ids[i] || ids[i] < 0))
                twin++;
            if (ids[i] < -1 || ids[i] >= n_experts)
                return fail(message, COLIBRI_ERROR_ARGUMENT,
                            "layers.%lld.moe.expert_ids: token %lld names expert %ld in slot %lld; there are experts 0 to %lld, "
                            "and -1 for none",
                            (long long)layer, token, (long)ids[i], (long long)i, last);
            if (twin < i)
                return fail(message, COLIBRI_ERROR_ARGUMENT,
                            "layers.%lld.moe.expert_ids: token %lld names expert %ld in slot %lld and again in slot %lld; each "
                            "of 0 to %lld can stand once in a row, -1 (none) in any slot",
                            (long long)layer, token, (long)ids[i], (long long)twin, (long long)i, last);
        }
    }
    return COLIBRI_OK;
}

static colibri_status step(session *s, colibri_progress progress, void *user, colibri_place *done, colibri_message *message)
{
    char text[PLACE_TEXT_SIZE];
    TRY(check_open_pass(s, message));
    colibri_place here = s->next;
    if (here.stage == COLIBRI_STAGE_DISPATCHER)
        TRY(check_choices(s, here.layer, 0, s->tile_tokens, message));

    machine_begin(&s->machine, progress, user, pass_done(s, here));
    s->began_next = true;
    if (!run_stage(s, here)) {
        char tail[PLACE_TEXT_SIZE + 32];
        snprintf(tail, sizeof tail, "the open pass is still before %s", place_text(here, text));
        return s->boundary.found != NULL ? boundary_fail(&s->boundary, tail, message)
                                         : fail(message, COLIBRI_ERROR_INTERRUPTED, "interrupted; %s", tail);
    }

    colibri_place next = next_place(s, here);
    if (next.stage == COLIBRI_STAGE_NONE)
        TRY(session_close_pass(s, message));
    else
        go_to(s, next);
    if (done != NULL)
        *done = here;
    return COLIBRI_OK;
}

colibri_status session_step(session *s, colibri_progress progress, void *user, colibri_place *done, colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = step(s, progress, user, done, message);
    session_leave(s);
    return status;
}

/* ---- route again ----------------------------------------------------------------------------------------------------------- */

static colibri_status route_again(session *s, colibri_gate_mode gates, int64_t k, int64_t first, int64_t count, bool keep_ids,
                                  colibri_message *message)
{
    char text[PLACE_TEXT_SIZE];
    TRY(check_open_pass(s, message));
    if (s->next.stage != COLIBRI_STAGE_DISPATCHER)
        return fail(message, COLIBRI_ERROR_ARGUMENT,
                    "experts are chosen between router and dispatcher; the open pass is before %s", place_text(s->next, text));
    if ((int)gates < COLIBRI_GATES_MODEL || (int)gates > COLIBRI_GATES_RAW_LOGITS)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "gate mode %d does not exist; the modes are 0 to %d", (int)gates,
                    COLIBRI_GATES_RAW_LOGITS);
    if (first < 0 || count < 0 || first > s->tile_tokens || count > s->tile_tokens - first)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "%lld rows from row %lld on are not all in the open pass, which has %lld",
                    (long long)count, (long long)first, (long long)s->tile_tokens);
    if (!keep_ids && (k < 1 || k > s->model->config.top_k))
        return fail(message, COLIBRI_ERROR_ARGUMENT, "k is %lld; a token has 1 to %lld experts here", (long long)k,
                    (long long)s->model->config.top_k);
    if (keep_ids)
        TRY(check_choices(s, s->next.layer, first, count, message));
    boundary_forget(&s->boundary, keep_ids ? POINT_GATES : POINT_SCORES, POINT_GATES, s->next.layer);
    boundary_begin_stage(&s->boundary, s->next.layer, s->tile_first);
    route_tile_again(s, s->next.layer, gates == COLIBRI_GATES_MODEL ? s->gates : gates, k, first, count, keep_ids);
    (void)boundary_end_stage(&s->boundary, false);
    return COLIBRI_OK;
}

colibri_status session_route_again(session *s, colibri_gate_mode gates, int64_t k, int64_t first, int64_t count, bool keep_ids,
                                   colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = route_again(s, gates, k, first, count, keep_ids, message);
    session_leave(s);
    return status;
}
