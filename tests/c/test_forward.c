/* One answer everywhere: the same ids give the same bytes in every tap, however the work is cut, watched or spread. */
#include "check.h"
#include "api/handles.h"
#include "support/snapshot.h"
#include "support/tiny_model.h"

#define N_TOKENS 40

typedef struct run_options {
    const char *capture[4];
    int threads;
    const kernels *table;  /* NULL: the one in force */
    int64_t chunk;         /* tokens in a pass; 0: all; -1: random */
    int64_t max_tokens;
} run_options;

#define EVERYTHING {"all", "layers.*.attn.weights"}

static colibri_session *open_session(colibri_model *m, const run_options *o)
{
    tiny_options options = {.threads = o->threads, .max_tokens = o->max_tokens};
    memcpy(options.capture, o->capture, sizeof options.capture);
    colibri_session *s = tiny_session(m, &options);
    if (o->table != NULL)
        s->inner->machine.kernels = o->table;
    return s;
}

static snapshot run(colibri_model *m, const run_options *o, const int32_t *ids, int64_t n)
{
    colibri_session *s = open_session(m, o);
    uint64_t state = 99;
    for (int64_t done = 0, step; done < n; done += step) {
        step = o->chunk == 0 ? n : o->chunk > 0 ? o->chunk : 1 + tiny_random(&state) % 9;
        step = step < n - done ? step : n - done;
        tiny_feed(s, ids + done, step);
    }
    snapshot out = snapshot_take(s);
    colibri_session_release(s);
    return out;
}

typedef void (*family_test)(colibri_model *m, const tiny_checkpoint *t, const snapshot *whole, const int32_t *ids);

/* Calls the test for a tiny model of every family, with all its taps from one pass on one thread by the scalar definition. */
static void for_every_family(family_test test)
{
    tiny_checkpoint tiny[] = {tiny_mixtral(), tiny_qwen2_moe(), tiny_qwen3_moe(), tiny_olmoe()};
    int32_t ids[N_TOKENS];
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    run_options o = {EVERYTHING, .threads = 1, .table = tables[n_tables - 1], .max_tokens = N_TOKENS};
    for (size_t i = 0; i < sizeof tiny / sizeof *tiny; i++) {
        colibri_model *m = tiny_open(&tiny[i]);
        tiny_ids(ids, N_TOKENS, &tiny[i], 5);
        snapshot whole = run(m, &o, ids, N_TOKENS);
        CHECK(snapshot_nonfinite(&whole, "logits") == 0);
        test(m, &tiny[i], &whole, ids);
        snapshot_free(&whole);
        tiny_close(m, &tiny[i]);
    }
}

static void expect_same(colibri_model *m, const run_options *o, const int32_t *ids, const snapshot *whole, const char *what)
{
    snapshot other = run(m, o, ids, N_TOKENS);
    CHECK(snapshot_same(&other, whole, what) > 1);
    snapshot_free(&other);
}

/* ---- the tests ------------------------------------------------------------------------------------------------------------- */

static void with_threads(colibri_model *m, const tiny_checkpoint *t, const snapshot *whole, const int32_t *ids)
{
    for (int threads = 1; threads <= 5; threads++) {
        run_options o = {EVERYTHING, .threads = threads, .max_tokens = N_TOKENS};
        expect_same(m, &o, ids, whole, t->model_type);
    }
}

static void test_bytes_are_equal_over_thread_counts(void)
{
    for_every_family(with_threads);
}

static void with_kernels(colibri_model *m, const tiny_checkpoint *t, const snapshot *whole, const int32_t *ids)
{
    const kernels *const *tables;
    size_t n = kernels_available(&tables);
    for (size_t i = 0; i < n; i++) {
        run_options o = {EVERYTHING, .threads = 1, .table = tables[i], .max_tokens = N_TOKENS};
        expect_same(m, &o, ids, whole, tables[i]->name);
    }
    (void)t;
}

static void test_bytes_are_equal_over_instruction_sets(void)
{
    for_every_family(with_kernels);
}

static void with_chunks(colibri_model *m, const tiny_checkpoint *t, const snapshot *whole, const int32_t *ids)
{
    const int64_t chunks[] = {1, 7, 39, -1};
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        run_options o = {EVERYTHING, .threads = 2, .chunk = chunks[i], .max_tokens = N_TOKENS};
        expect_same(m, &o, ids, whole, t->model_type);
    }
}

static void test_bytes_are_equal_over_chunkings(void)
{
    for_every_family(with_chunks);
}

static void with_captures(colibri_model *m, const tiny_checkpoint *t, const snapshot *whole, const int32_t *ids)
{
    const char *const captures[] = {"none",
                                    "routing",
                                    "moe",
                                    "all",
                                    "layers.*.attn.weights",
                                    "logits",
                                    "norm",
                                    "embed",
                                    "layers.0.*",
                                    "layers.*.output",
                                    "layers.0.moe.experts.2.hidden",
                                    "*.moe.dispatch.up",
                                    "layers.*.moe.routed"};
    for (size_t i = 0; i < sizeof captures / sizeof *captures; i++) {
        run_options o = {{captures[i]}, .threads = 2, .chunk = 11, .max_tokens = N_TOKENS + 3};
        expect_same(m, &o, ids, whole, captures[i]);
    }
    (void)t;
}

static void test_bytes_are_equal_over_captures(void)
{
    for_every_family(with_captures);
}

static void test_a_pass_of_several_tiles_equals_one_of_one_tile(void)
{
    enum { n = 2 * TILE_TOKENS + 77 };
    tiny_checkpoint t = tiny_mixtral();
    t.layers = 1;
    static int32_t ids[n];
    colibri_model *m = tiny_open(&t);
    tiny_ids(ids, n, &t, 6);
    run_options tiled = {{"routing", "layers.*.moe.output", "layers.*.output"}, .threads = 2, .max_tokens = n};
    run_options whole = {{"moe", "layers.*.output"}, .threads = 1, .max_tokens = n};
    snapshot a = run(m, &tiled, ids, n), b = run(m, &whole, ids, n);
    CHECK(snapshot_same(&a, &b, "tiles") > 5);
    snapshot_free(&a);
    snapshot_free(&b);
    tiny_close(m, &t);
}

/* Three tokens leave some expert of layer 1 without work; what its weights hold must not matter to them. */
static void check_planted(const char *tensor, float value)
{
    tiny_checkpoint clean = tiny_mixtral(), planted = tiny_mixtral();
    int32_t ids[N_TOKENS];
    run_options o = {EVERYTHING, .threads = 2, .max_tokens = N_TOKENS};
    colibri_model *m = tiny_open(&clean);
    tiny_ids(ids, N_TOKENS, &clean, 5);

    const int64_t n = 3;
    int64_t unused = -1;
    snapshot a = run(m, &o, ids, n);
    const snapshot_entry *chosen = snapshot_find(&a, "layers.1.moe.expert_ids");
    for (int32_t e = 0; e < clean.experts && unused < 0; e++) {
        bool seen = false;
        for (int64_t i = 0; i < chosen->n_bytes / 4; i++)
            seen = seen || ((const int32_t *)(const void *)chosen->bytes)[i] == e;
        unused = seen ? -1 : e;
    }
    CHECK(unused >= 0);

    char name[128];
    snprintf(name, sizeof name, "model.layers.1.block_sparse_moe.experts.%d.%s.weight", (int)unused, tensor);
    planted.plant_tensor = name;
    planted.plant_index = -1;
    planted.plant_value = value;
    colibri_model *p = tiny_open(&planted);
    snapshot b = run(p, &o, ids, n);
    CHECK(snapshot_same(&a, &b, name) > 1);

    /* and an expert with tokens would have shown it */
    snapshot c = run(p, &o, ids, N_TOKENS);
    CHECK(snapshot_nonfinite(&c, "logits") > 0);
    snapshot_free(&a);
    snapshot_free(&b);
    snapshot_free(&c);
    tiny_close(m, &clean);
    tiny_close(p, &planted);
}

static void test_B3_an_expert_never_chosen_is_never_touched(void)
{
    const float nan = (float)strtod("nan", NULL), inf = (float)strtod("inf", NULL);
    const char *const tensors[] = {"w1", "w2", "w3"};
    for (int i = 0; i < 3; i++) {
        check_planted(tensors[i], nan);
        check_planted(tensors[i], inf);
    }
}

static void test_B3_what_lies_in_scratch_before_a_pass_does_not_matter(void)
{
    tiny_checkpoint t = tiny_qwen2_moe();
    int32_t ids[N_TOKENS];
    run_options o = {{"none"}, .threads = 2, .max_tokens = N_TOKENS};
    colibri_model *m = tiny_open(&t);
    tiny_ids(ids, N_TOKENS, &t, 5);
    snapshot clean = run(m, &o, ids, N_TOKENS);

    colibri_session *s = open_session(m, &o);
    memset(block_data(s->inner->scratch), 0xFF, (size_t)block_bytes(s->inner->scratch)); /* NaN everywhere */
    memset(block_data(s->inner->tape), 0xFF, (size_t)block_bytes(s->inner->tape));
    tiny_feed(s, ids, N_TOKENS);
    snapshot dirty = snapshot_take(s);
    snapshot_same(&dirty, &clean, "scratch full of NaN");
    snapshot_free(&clean);
    snapshot_free(&dirty);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void check_planted_runs(const tiny_checkpoint *like, const char *tensor, int64_t index, float value)
{
    tiny_checkpoint t = *like;
    int32_t ids[N_TOKENS];
    t.plant_tensor = tensor;
    t.plant_index = index;
    t.plant_value = value;
    colibri_model *m = tiny_open(&t);
    tiny_ids(ids, N_TOKENS, &t, 5);
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    run_options base = {EVERYTHING, .threads = 1, .table = tables[n_tables - 1], .max_tokens = N_TOKENS};
    snapshot whole = run(m, &base, ids, N_TOKENS);
    CHECK(snapshot_nonfinite(&whole, "logits") > 0);
    const struct {
        int threads;
        int64_t chunk;
        size_t table;
    } ways[] = {{1, 0, 0}, {2, 0, 0}, {2, 1, 0}, {3, -1, 0}, {2, 7, n_tables - 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        run_options o = {EVERYTHING, .threads = ways[i].threads, .chunk = ways[i].chunk, .table = tables[ways[i].table],
                         .max_tokens = N_TOKENS};
        expect_same(m, &o, ids, &whole, tensor);
    }
    snapshot_free(&whole);
    tiny_close(m, &t);
}

static void test_bytes_are_equal_with_planted_nan_and_inf(void)
{
    const float nan = (float)strtod("nan", NULL), inf = (float)strtod("inf", NULL);
    tiny_checkpoint mixtral = tiny_mixtral(), qwen2 = tiny_qwen2_moe(), olmoe = tiny_olmoe();
    const float values[] = {nan, inf, -inf};
    for (int i = 0; i < 3; i++) {
        check_planted_runs(&mixtral, "model.layers.0.self_attn.v_proj.weight", 3, values[i]);
        check_planted_runs(&mixtral, "model.layers.1.block_sparse_moe.experts.1.w1.weight", 5, values[i]);
        check_planted_runs(&mixtral, "model.layers.0.block_sparse_moe.gate.weight", 30, values[i]);
        check_planted_runs(&qwen2, "model.layers.1.mlp.up_proj.weight", 0, values[i]);
        check_planted_runs(&qwen2, "model.layers.0.mlp.shared_expert.down_proj.weight", 9, values[i]);
        check_planted_runs(&olmoe, "model.layers.0.self_attn.o_proj.weight", 2, values[i]);
    }
}

int main(void)
{
    RUN(test_bytes_are_equal_over_thread_counts);
    RUN(test_bytes_are_equal_over_instruction_sets);
    RUN(test_bytes_are_equal_over_chunkings);
    RUN(test_bytes_are_equal_over_captures);
    RUN(test_a_pass_of_several_tiles_equals_one_of_one_tile);
    RUN(test_B3_an_expert_never_chosen_is_never_touched);
    RUN(test_B3_what_lies_in_scratch_before_a_pass_does_not_matter);
    RUN(test_bytes_are_equal_with_planted_nan_and_inf);
    return 0;
}
