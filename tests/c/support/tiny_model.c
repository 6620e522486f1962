#include "tiny_model.h"

#include "../check.h"
#include "api/handles.h"

colibri_model *tiny_open(tiny_checkpoint *t)
{
    colibri_model *m;
    colibri_message message;
    tiny_checkpoint_write(t);
    CHECK_OK(colibri_model_open(t->folder, &m, &message), message);
    return m;
}

void tiny_close(colibri_model *m, const tiny_checkpoint *t)
{
    CHECK(colibri_model_users(m) == 0);
    colibri_model_release(m);
    tiny_checkpoint_remove(t);
}

colibri_session *tiny_session(colibri_model *m, const tiny_options *o)
{
    colibri_session *s;
    colibri_message message;
    CHECK(setenv("COLIBRI_CPUS", "16", 1) == 0); /* as many threads as a test asks for, whatever machine it runs on */
    colibri_session_options options = {.size = sizeof options,
                                       .capture = o->capture,
                                       .threads = o->threads > 0 ? o->threads : 1,
                                       .max_tokens = o->max_tokens,
                                       .gate_mode = o->gates,
                                       .watch = o->watch};
    while (options.n_capture < 4 && o->capture[options.n_capture] != NULL)
        options.n_capture++;
    CHECK_OK(colibri_session_create(m, &options, &s, &message), message);
    s->inner->machine.serial_below = 0;
    return s;
}

void tiny_ids(int32_t *ids, int64_t n, const tiny_checkpoint *t, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++)
        ids[i] = (int32_t)(tiny_random(&seed) % (uint32_t)t->vocab);
}

void tiny_feed(colibri_session *s, const int32_t *ids, int64_t n)
{
    colibri_message message;
    CHECK_OK(colibri_session_feed(s, ids, n, NULL, NULL, &message), message);
}

size_t tiny_kind(const char *path)
{
    size_t count, kind = 0;
    const colibri_tap_kind *kinds = colibri_tap_kinds(&count);
    while (kind < count && strcmp(kinds[kind].path, path) != 0)
        kind++;
    CHECK(kind < count);
    return kind;
}

colibri_array tiny_tap(colibri_session *s, const char *path, int64_t layer, int64_t expert, int64_t pass, colibri_lease **lease)
{
    colibri_array a;
    colibri_message message;
    CHECK_OK(colibri_session_tap(s, tiny_kind(path), layer, expert, pass, &a, lease, &message), message);
    return a;
}
