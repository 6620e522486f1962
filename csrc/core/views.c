#include "views.h"

#include "../utils/instant.h"
#include "capture.h"

colibri_status tap_check(const config *c, size_t kind, int64_t layer, int64_t expert, colibri_message *message)
{
    if (kind >= TAP_COUNT)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "tap kind %zu does not exist; there are 0 to %d", kind, TAP_COUNT - 1);
    tap t = (tap)kind;
    if (!tap_is_per_layer(t))
        return COLIBRI_OK;
    if (layer < 0 || layer >= c->num_hidden_layers)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "layer %lld does not exist; the model has layers 0 to %lld",
                    (long long)layer, (long long)c->num_hidden_layers - 1);
    if (!tap_exists(c, t, layer))
        return fail(message, COLIBRI_ERROR_ARGUMENT, "\"%s\" does not exist in layer %lld: the layer %s", tap_kinds[t].path,
                    (long long)layer,
                    !c->is_moe[layer]                           ? "is dense (mlp.input, mlp.output)"
                    : tap_kinds[t].scope == COLIBRI_SCOPE_DENSE ? "is a mixture of experts (moe.input, moe.output)"
                                                                : "has no shared expert");
    if (tap_kinds[t].scope == COLIBRI_SCOPE_EXPERT && (expert < 0 || expert >= c->num_experts))
        return fail(message, COLIBRI_ERROR_ARGUMENT, "expert %lld does not exist; layer %lld has experts 0 to %lld",
                    (long long)expert, (long long)layer, (long long)c->num_experts - 1);
    return COLIBRI_OK;
}

colibri_status tap_not_captured(tap t, int64_t layer, int64_t expert, colibri_message *message)
{
    char path[TAP_PATH_SIZE];
    tap_path(t, layer, expert, path);
    const char *level = capture_level_name(tap_kinds[t].level);
    if (level == NULL)
        return fail(message, COLIBRI_ERROR_NOT_CAPTURED, "\"%s\" is not kept by this session; ask for it with capture \"%s\"",
                    path, path);
    return fail(message, COLIBRI_ERROR_NOT_CAPTURED,
                "\"%s\" is not kept by this session; ask for it with capture \"%s\" or \"%s\"", path, level, path);
}

colibri_array tap_array(const config *c, tap t, const void *data, int64_t n_rows)
{
    colibri_array a = {.data = data, .dtype = tap_kinds[t].dtype, .shape = {n_rows}};
    a.n_dims = 1 + tap_row_shape(c, t, a.shape + 1);
    int64_t stride = (int64_t)colibri_dtype_size(a.dtype);
    for (int i = a.n_dims - 1; i >= 0; i--) {
        a.strides[i] = stride;
        stride *= a.shape[i];
    }
    return a;
}

/* Rows first .. stop - 1 of a kept tap. */
static colibri_array view_rows(const session *s, tap t, int64_t layer, int64_t first, int64_t stop)
{
    const slot *p = layout_slot(&s->layout, &s->model->config, t, layer);
    return tap_array(&s->model->config, t, block_data(s->tape) + p->offset + first * p->row_bytes, stop - first);
}

colibri_array tap_heads(const session *s, tap t, int64_t layer, int64_t first, int64_t stop)
{
    const config *c = &s->model->config;
    const slot *p = layout_slot(&s->layout, c, t, layer);
    return (colibri_array){.data = block_data(s->tape) + p->offset + first * p->row_bytes,
                           .dtype = tap_kinds[t].dtype,
                           .n_dims = 3,
                           .shape = {c->num_attention_heads, stop - first, stop},
                           .strides = {s->layout.max_tokens * p->row_bytes, p->row_bytes, (int64_t)sizeof(float)}};
}

/* pass is -1 for all of them. Within an instant. */
static colibri_array view_tap(const session *s, tap t, int64_t layer, int64_t expert, int64_t pass)
{
    int64_t k = s->model->config.top_k, n_experts = s->model->config.num_experts;
    if (tap_rows_of(t) == ROWS_OF_EXPERT) {
        pass = pass < 0 ? s->n_passes - 1 : pass;
        if (pass < 0) /* nothing was fed */
            return view_rows(s, t, layer, 0, 0);
        const slot *p = layout_slot(&s->layout, &s->model->config, TAP_DISPATCH_OFFSETS, layer);
        const int64_t *offsets = (const int64_t *)(const void *)(block_data(s->tape) + p->offset) + pass * (n_experts + 1);
        return view_rows(s, t, layer, offsets[expert], offsets[expert + 1]);
    }
    int64_t start = pass < 0 ? 0 : session_passes(s)[2 * pass];
    int64_t stop = pass < 0 ? s->n_tokens : session_passes(s)[2 * pass + 1];
    switch (tap_rows_of(t)) {
    case ROWS_HEADS: return tap_heads(s, t, layer, start, stop);
    case ROWS_PACKED: return view_rows(s, t, layer, start * k, stop * k);
    case ROWS_PASSES: return view_rows(s, t, layer, pass < 0 ? 0 : pass, pass < 0 ? s->n_passes : pass + 1);
    default: return view_rows(s, t, layer, start, stop);
    }
}

colibri_status session_tap(session *s, size_t kind, int64_t layer, int64_t expert, int64_t pass, colibri_array *array,
                           block **holder, colibri_message *message)
{
    TRY(tap_check(&s->model->config, kind, layer, expert, message));
    tap t = (tap)kind;
    if (!session_keeps(s, t, layer))
        return tap_not_captured(t, layer, expert, message);

    instant_begin();
    int64_t n_passes = s->n_passes;
    bool exists = pass >= -1 && pass < n_passes;
    if (exists) {
        *array = view_tap(s, t, layer, expert, pass);
        *holder = s->tape;
        block_retain(s->tape);
    }
    instant_end();
    return exists ? COLIBRI_OK
                  : fail(message, COLIBRI_ERROR_ARGUMENT, "pass %lld does not exist; the session has %lld", (long long)pass,
                         (long long)n_passes);
}

colibri_status session_logits(session *s, colibri_array *array, block **holder, colibri_message *message)
{
    bool in_tape = session_keeps(s, TAP_LOGITS, 0);
    instant_begin();
    int64_t n_tokens = s->n_tokens;
    bool there = in_tape ? n_tokens > 0 : s->has_logits;
    if (there) {
        *holder = in_tape ? s->tape : s->logits;
        block_retain(*holder);
        *array = (colibri_array){
            .data = block_data(*holder), .n_dims = 1, .shape = {s->model->config.vocab_size}, .strides = {sizeof(float)}};
        if (in_tape)
            array->data = view_rows(s, TAP_LOGITS, 0, n_tokens - 1, n_tokens).data;
    }
    instant_end();
    if (there)
        return COLIBRI_OK;
    return n_tokens == 0 ? fail(message, COLIBRI_ERROR_ARGUMENT, "there are no logits yet: the session has no token")
                         : fail(message, COLIBRI_ERROR_NOT_CAPTURED,
                                "the logits of token %lld went when later tokens were abandoned; capture \"logits\" keeps them",
                                (long long)(n_tokens - 1));
}
