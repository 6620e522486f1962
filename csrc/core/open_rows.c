#include "open_rows.h"

#include <stdio.h>
#include <string.h>

#include "stepping.h"
#include "views.h"

/* ---- what is there --------------------------------------------------------------------------------------------------------- */

static colibri_stage written_by(tap t)
{
    switch (t) {
    case TAP_EMBED: return COLIBRI_STAGE_EMBED;
    case TAP_ATTN_NORM:
    case TAP_ATTN_Q:
    case TAP_ATTN_K:
    case TAP_ATTN_V:
    case TAP_ATTN_WEIGHTS:
    case TAP_ATTN_OUT: return COLIBRI_STAGE_ATTENTION;
    case TAP_MOE_INPUT:
    case TAP_ROUTER_LOGITS:
    case TAP_SCORES:
    case TAP_EXPERT_IDS:
    case TAP_GATES: return COLIBRI_STAGE_ROUTER;
    case TAP_DISPATCH_TOKENS:
    case TAP_DISPATCH_OFFSETS:
    case TAP_DISPATCH_INPUT:
    case TAP_EXPERT_TOKENS:
    case TAP_EXPERT_INPUT: return COLIBRI_STAGE_DISPATCHER;
    case TAP_DISPATCH_GATE:
    case TAP_DISPATCH_UP:
    case TAP_DISPATCH_HIDDEN:
    case TAP_DISPATCH_OUTPUT:
    case TAP_EXPERT_GATE:
    case TAP_EXPERT_UP:
    case TAP_EXPERT_HIDDEN:
    case TAP_EXPERT_OUTPUT: return COLIBRI_STAGE_EXPERT;
    case TAP_SHARED_OUTPUT:
    case TAP_SHARED_GATE: return COLIBRI_STAGE_SHARED;
    case TAP_MOE_ROUTED:
    case TAP_MOE_OUTPUT: return COLIBRI_STAGE_AGGREGATOR;
    case TAP_MLP_INPUT:
    case TAP_MLP_OUTPUT: return COLIBRI_STAGE_MLP;
    case TAP_OUTPUT: return COLIBRI_STAGE_RESIDUAL;
    case TAP_NORM: return COLIBRI_STAGE_NORM;
    default: return COLIBRI_STAGE_LOGITS;
    }
}

/* A number that grows from stage to stage of a pass. */
static int64_t order(const session *s, colibri_stage stage, int64_t layer)
{
    if (stage == COLIBRI_STAGE_EMBED || stage >= COLIBRI_STAGE_NORM)
        layer = stage == COLIBRI_STAGE_EMBED ? -1 : s->model->config.num_hidden_layers;
    return layer * COLIBRI_STAGE_NONE + (int64_t)stage;
}

static bool is_written(const session *s, tap t, int64_t layer, int64_t expert)
{
    colibri_stage stage = written_by(t);
    int64_t now = order(s, s->next.stage, s->next.layer), then = order(s, stage, layer);
    bool of_an_earlier_expert =
        now == then && stage == COLIBRI_STAGE_EXPERT && tap_rows_of(t) == ROWS_OF_EXPERT && expert < s->next.expert;
    return then < now || of_an_earlier_expert;
}

/* A later layer has begun to write where this one's rows are: layers that do not keep a tap share its working memory. */
static bool is_overwritten(const session *s, tap t, int64_t layer)
{
    const config *c = &s->model->config;
    int64_t now = order(s, s->next.stage, s->next.layer) + (s->began_next ? 1 : 0);
    colibri_stage stage = written_by(t);
    if (stage == COLIBRI_STAGE_EXPERT) /* the dispatcher clears rows that nobody uses */
        stage = COLIBRI_STAGE_DISPATCHER;
    if (!tap_is_per_layer(t) || session_keeps(s, t, layer))
        return false;
    for (int64_t l = layer + 1; l < c->num_hidden_layers && order(s, stage, l) < now; l++)
        if (tap_exists(c, t, l) && !session_keeps(s, t, l))
            return true;
    return false;
}

/* ---- where it is ----------------------------------------------------------------------------------------------------------- */

static colibri_array rows_of(const session *s, tap t, int64_t layer, int64_t expert)
{
    const config *c = &s->model->config;
    const unsigned char *data = session_rows(s, tap_storage(c, t), layer);
    switch (tap_rows_of(t)) {
    case ROWS_HEADS: return tap_heads(s, t, layer, s->tile_first, s->tile_first + s->tile_tokens);
    case ROWS_PACKED: return tap_array(c, t, data, s->tile_tokens * c->top_k);
    case ROWS_PASSES: return tap_array(c, t, data, 1);
    case ROWS_TOKENS: return tap_array(c, t, data, s->tile_tokens);
    case ROWS_OF_EXPERT: break;
    }
    const int64_t *offsets = session_rows(s, TAP_DISPATCH_OFFSETS, layer);
    int64_t first = offsets[expert] - s->tile_first * c->top_k;
    return tap_array(c, t, data + first * tap_row_bytes(c, t), offsets[expert + 1] - offsets[expert]);
}

/* The open rows of a tap, kept or in working memory. */
static colibri_status find(const session *s, size_t kind, int64_t layer, int64_t expert, colibri_array *array,
                           colibri_message *message)
{
    char path[TAP_PATH_SIZE], place[PLACE_TEXT_SIZE];
    const config *c = &s->model->config;
    TRY(tap_check(c, kind, layer, expert, message));
    TRY(check_open_pass(s, message));
    tap t = (tap)kind;
    tap_path(t, layer, expert, path);
    place_text(s->next, place);
    bool somewhere = layout_slot(&s->layout, c, t, layer)->row_bytes > 0;
    if (!somewhere && t != TAP_LOGITS)
        return tap_not_captured(t, layer, expert, message);
    if (!is_written(s, t, layer, expert))
        return fail(message, COLIBRI_ERROR_ARGUMENT, "\"%s\" is not written yet: the open pass is before %s", path, place);
    if (is_overwritten(s, t, layer))
        return fail(message, COLIBRI_ERROR_ARGUMENT,
                    "\"%s\" is gone: it was working memory, which a later layer uses now (the open pass is before %s); a capture "
                    "that names it keeps it",
                    path, place);
    *array = rows_of(s, t, layer, expert);
    return COLIBRI_OK;
}

static int64_t bytes_of(const colibri_array *a)
{
    int64_t n = (int64_t)colibri_dtype_size(a->dtype);
    for (int i = 0; i < a->n_dims; i++)
        n *= a->shape[i];
    return n;
}

static bool is_index(tap t)
{
    return t == TAP_DISPATCH_TOKENS || t == TAP_DISPATCH_OFFSETS || t == TAP_EXPERT_TOKENS;
}

/* The dispatcher's indices say where rows lie: they follow from the ids. */
static colibri_status check_editable(size_t kind, int64_t layer, int64_t expert, colibri_message *message)
{
    char path[TAP_PATH_SIZE];
    if (kind >= TAP_COUNT || !is_index((tap)kind))
        return COLIBRI_OK;
    tap_path((tap)kind, layer, expert, path);
    return fail(message, COLIBRI_ERROR_ARGUMENT,
                "\"%s\" only says where rows lie; edit layers.%lld.moe.expert_ids after the router instead", path,
                (long long)layer);
}

/* ---- look ------------------------------------------------------------------------------------------------------------------ */

/* The rows themselves where the tape has them, for as long as somebody holds it; else a copy. */
static colibri_status look(session *s, size_t kind, int64_t layer, int64_t expert, bool edit, colibri_array *array,
                           block **holder, colibri_message *message)
{
    if (edit)
        TRY(check_editable(kind, layer, expert, message));
    TRY(find(s, kind, layer, expert, array, message));
    int64_t n_bytes = bytes_of(array);
    bool kept = session_keeps(s, (tap)kind, layer);
    if (edit && !kept)
        return tap_not_captured((tap)kind, layer, expert, message);
    if (kept || n_bytes == 0) {
        s->shown = true;
        *holder = s->tape;
        block_retain(s->tape);
        return COLIBRI_OK;
    }
    TRY(block_create(n_bytes, BLOCK_HISTORY, s->model, holder, message));
    memcpy(block_data(*holder), array->data, (size_t)n_bytes);
    array->data = block_data(*holder);
    return COLIBRI_OK;
}

colibri_status session_open_rows(session *s, size_t kind, int64_t layer, int64_t expert, bool edit, colibri_array *array,
                                 block **holder, colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = look(s, kind, layer, expert, edit, array, holder, message);
    session_leave(s);
    return status;
}

/* ---- change ---------------------------------------------------------------------------------------------------------------- */

/* "float32 (3, 2)" */
static void describe(const colibri_array *a, char *out, size_t size)
{
    static const char names[][12] = {"float32", "float16", "bfloat16", "int32", "int64"};
    size_t n = (size_t)snprintf(out, size, "%s", names[a->dtype]);
    for (int i = 0; i < a->n_dims; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%lld", i > 0 ? ", " : " (", (long long)a->shape[i]);
    snprintf(out + n, size - n, ")");
}

static bool is_such(const colibri_array *given, const colibri_array *rows)
{
    bool such = given->dtype == rows->dtype && given->n_dims == rows->n_dims;
    for (int i = 0; such && i < rows->n_dims; i++)
        such = given->shape[i] == rows->shape[i] && (given->strides[i] == rows->strides[i] || given->shape[i] < 2);
    return such;
}

static colibri_status open_write(session *s, size_t kind, int64_t layer, int64_t expert, const colibri_array *given,
                                 colibri_message *message)
{
    colibri_array rows;
    TRY(check_editable(kind, layer, expert, message));
    if (kind == TAP_ATTN_WEIGHTS)
        return fail(message, COLIBRI_ERROR_ARGUMENT,
                    "attn.weights are only shown, no stage reads them; write attn.out after the attention instead");
    if (given->n_dims < 0 || given->n_dims > COLIBRI_MAX_DIMS)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "an array has 0 to %d dimensions, not %d", COLIBRI_MAX_DIMS, given->n_dims);
    TRY(find(s, kind, layer, expert, &rows, message));
    if (!is_such(given, &rows)) {
        char text[2][160] = {"", ""};
        for (int i = 0; i < 2; i++)
            describe(i == 0 ? &rows : given, text[i], sizeof text[i]);
        return fail(message, COLIBRI_ERROR_ARGUMENT, "these rows are %s, contiguous; given is %s", text[0], text[1]);
    }
    unsigned char *base = block_data(session_keeps(s, (tap)kind, layer) ? s->tape : s->scratch);
    memmove(base + ((const unsigned char *)rows.data - base), given->data, (size_t)bytes_of(&rows)); /* may be these very rows */
    return COLIBRI_OK;
}

colibri_status session_open_write(session *s, size_t kind, int64_t layer, int64_t expert, const colibri_array *rows,
                                  colibri_message *message)
{
    TRY(session_enter(s, message));
    colibri_status status = open_write(s, kind, layer, expert, rows, message);
    session_leave(s);
    return status;
}
