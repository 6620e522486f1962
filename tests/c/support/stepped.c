#include "stepped.h"

#include "../check.h"
#include "api/handles.h"

tiny_checkpoint (*const families[N_FAMILIES])(void) = {tiny_mixtral, tiny_qwen2_moe, tiny_qwen3_moe, tiny_olmoe};

const tiny_options captures[N_CAPTURES] = {
    {{"none"}, 1, .max_tokens = N_IDS},
    {{"routing"}, 3, .max_tokens = N_IDS},
    {{"moe"}, 1, .max_tokens = N_IDS},
    {{"all"}, 3, .max_tokens = N_IDS},
    {{"layers.*.attn.weights", "layers.0.moe.gates", "layers.0.moe.experts.*.up", "logits"}, 2, .max_tokens = N_IDS},
};

colibri_place step(colibri_session *s)
{
    colibri_place next, done;
    colibri_message message;
    CHECK(colibri_session_next(s, &next));
    CHECK_OK(colibri_session_step(s, NULL, NULL, &done, &message), message);
    CHECK(memcmp(&next, &done, sizeof done) == 0);
    return done;
}

void begin(colibri_session *s, const int32_t *ids, int64_t n)
{
    colibri_message message;
    CHECK_OK(colibri_session_begin(s, ids, n, &message), message);
}

bool is_open(colibri_session *s)
{
    colibri_place next;
    return colibri_session_next(s, &next);
}

int finish(colibri_session *s)
{
    int n_steps = 0;
    for (; is_open(s); n_steps++)
        step(s);
    return n_steps;
}

void step_to(colibri_session *s, colibri_stage stage, int64_t layer)
{
    colibri_place next;
    while (colibri_session_next(s, &next) && !(next.stage == stage && next.layer == layer))
        step(s);
    CHECK(next.stage == stage);
}

snapshot fed(colibri_model *m, const tiny_options *o, const int32_t *ids, int64_t first)
{
    colibri_session *s = tiny_session(m, o);
    tiny_feed(s, ids, first);
    tiny_feed(s, ids + first, N_IDS - first);
    snapshot shown = snapshot_take(s);
    colibri_session_release(s);
    return shown;
}

void check_shows(colibri_session *s, const snapshot *expected, const char *what)
{
    snapshot shown = snapshot_take(s);
    CHECK(shown.n == expected->n && snapshot_same(&shown, expected, what) > 0);
    snapshot_free(&shown);
}

colibri_status open_tap(colibri_session *s, const char *path, int64_t layer, int64_t expert, colibri_array *array,
                        colibri_lease **lease, colibri_message *message)
{
    return colibri_session_open_tap(s, tiny_kind(path), layer, expert, array, lease, message);
}

void *edit(colibri_session *s, const char *path, int64_t layer)
{
    colibri_array array;
    colibri_lease *lease;
    colibri_message message;
    CHECK_OK(colibri_session_open_edit(s, tiny_kind(path), layer, 0, &array, &lease, &message), message);
    colibri_lease_release(lease);
    return (unsigned char *)block_data(s->inner->tape) + ((const unsigned char *)array.data - block_data(s->inner->tape));
}
