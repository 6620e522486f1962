/* The table of taps and the patterns that choose from it. */
#include "core/taps.h"

#include "check.h"
#include "core/capture.h"

#define MOST_LAYERS 4

/* Layer 0 dense, the others with 6 experts. */
static config a_config(int64_t shared_width)
{
    config c = {.num_hidden_layers = MOST_LAYERS,
                .hidden_size = 8,
                .vocab_size = 11,
                .num_experts = 6,
                .top_k = 2,
                .moe_intermediate_size = 5,
                .shared_expert_intermediate_size = shared_width,
                .num_attention_heads = 4,
                .num_key_value_heads = 2,
                .head_dim = 3};
    for (int l = 1; l < MOST_LAYERS; l++)
        c.is_moe[l] = true;
    return c;
}

typedef struct marks {
    bool kept[MOST_LAYERS * TAP_COUNT];
} marks;

static colibri_status resolve(const config *c, const char *pattern, marks *m, colibri_message *message)
{
    *m = (marks){{false}};
    return capture_resolve(c, &pattern, 1, m->kept, message);
}

static int count(const marks *m)
{
    int n = 0;
    for (int i = 0; i < MOST_LAYERS * TAP_COUNT; i++)
        n += m->kept[i];
    return n;
}

static void test_every_kind_has_a_path_of_its_own_and_a_place(void)
{
    config c = a_config(7);
    char path[TAP_PATH_SIZE], other[TAP_PATH_SIZE];
    for (int a = 0; a < TAP_COUNT; a++) {
        CHECK(tap_kinds[a].path != NULL && tap_kinds[a].what != NULL && tap_kinds[a].axes != NULL);
        CHECK(tap_is_per_layer((tap)a) == (strstr(tap_kinds[a].path, "{l}") != NULL));
        CHECK((tap_kinds[a].scope == COLIBRI_SCOPE_EXPERT) == (strstr(tap_kinds[a].path, "{e}") != NULL));
        tap_path((tap)a, 12, 345, path);
        CHECK(strchr(path, '{') == NULL);
        for (int b = 0; b < a; b++) {
            tap_path((tap)b, 12, 345, other);
            CHECK(strcmp(path, other) != 0);
        }
        tap storage = tap_storage(&c, (tap)a);
        CHECK(tap_storage(&c, storage) == storage && tap_kinds[storage].dtype == tap_kinds[a].dtype);
        CHECK(tap_row_bytes(&c, storage) == tap_row_bytes(&c, (tap)a) || tap_rows_of((tap)a) == ROWS_HEADS);
    }
    tap_path(TAP_EXPERT_OUTPUT, 3, 17, path);
    CHECK(strcmp(path, "layers.3.moe.experts.17.output") == 0);
}

static void test_row_shapes_follow_the_axes(void)
{
    config c = a_config(0);
    int64_t shape[COLIBRI_MAX_DIMS - 1];
    CHECK(tap_row_shape(&c, TAP_ATTN_K, shape) == 2 && shape[0] == 2 && shape[1] == 3);
    CHECK(tap_row_shape(&c, TAP_LOGITS, shape) == 1 && shape[0] == 11);
    CHECK(tap_row_shape(&c, TAP_DISPATCH_OFFSETS, shape) == 1 && shape[0] == 7);
    CHECK(tap_row_shape(&c, TAP_DISPATCH_TOKENS, shape) == 0);
    CHECK(tap_row_shape(&c, TAP_SHARED_GATE, shape) == 1 && shape[0] == 1);
    CHECK(tap_row_bytes(&c, TAP_EXPERT_IDS) == 8 && tap_row_bytes(&c, TAP_DISPATCH_OFFSETS) == 56 &&
          tap_row_bytes(&c, TAP_EXPERT_HIDDEN) == 20);
}

static void test_levels_grow_and_always_hold_the_kv_cache(void)
{
    config c = a_config(7);
    const char *const levels[] = {"none", "routing", "moe", "all"};
    marks last = {{false}}, m;
    colibri_message message;
    for (int i = 0; i < 4; i++) {
        CHECK_OK(resolve(&c, levels[i], &m, &message), message);
        for (int j = 0; j < MOST_LAYERS * TAP_COUNT; j++)
            CHECK(!last.kept[j] || m.kept[j]);
        CHECK(count(&m) > count(&last) && m.kept[TAP_ATTN_K] && m.kept[3 * TAP_COUNT + TAP_ATTN_V]);
        last = m;
    }
    CHECK(!last.kept[TAP_COUNT + TAP_ATTN_WEIGHTS] && last.kept[TAP_COUNT + TAP_DISPATCH_HIDDEN] && last.kept[TAP_LOGITS]);
    CHECK(last.kept[TAP_MLP_OUTPUT] && !last.kept[TAP_COUNT + TAP_MLP_OUTPUT] && !last.kept[TAP_GATES]);
    CHECK_OK(resolve(&c, "moe", &m, &message), message);
    CHECK(m.kept[TAP_COUNT + TAP_DISPATCH_OUTPUT] && !m.kept[TAP_COUNT + TAP_DISPATCH_GATE] &&
          m.kept[TAP_COUNT + TAP_SHARED_GATE]);
}

static void test_a_star_stands_for_any_run_of_characters(void)
{
    config c = a_config(0);
    marks m;
    colibri_message message;
    CHECK_OK(resolve(&c, "layers.*.moe.gates", &m, &message), message);
    CHECK(count(&m) == 2 * MOST_LAYERS + 3 && m.kept[3 * TAP_COUNT + TAP_GATES]);
    CHECK_OK(resolve(&c, "layers.2.*", &m, &message), message);
    CHECK(m.kept[2 * TAP_COUNT + TAP_OUTPUT] && m.kept[2 * TAP_COUNT + TAP_SCORES] && !m.kept[TAP_COUNT + TAP_SCORES]);
    CHECK(!m.kept[2 * TAP_COUNT + TAP_ATTN_WEIGHTS]); /* heavy: its last word must be spelled out */
    CHECK_OK(resolve(&c, "layers.1.*.weights", &m, &message), message);
    CHECK(m.kept[TAP_COUNT + TAP_ATTN_WEIGHTS] && !m.kept[2 * TAP_COUNT + TAP_ATTN_WEIGHTS]);
    CHECK_OK(resolve(&c, "*norm", &m, &message), message);
    CHECK(m.kept[TAP_NORM] && m.kept[TAP_ATTN_NORM] && m.kept[2 * TAP_COUNT + TAP_ATTN_NORM]);
}

static void test_one_expert_by_name_keeps_the_packed_rows_of_its_layer(void)
{
    config c = a_config(0);
    marks m;
    colibri_message message;
    CHECK_OK(resolve(&c, "layers.1.moe.experts.5.up", &m, &message), message);
    CHECK(m.kept[TAP_COUNT + TAP_DISPATCH_UP] && m.kept[TAP_COUNT + TAP_DISPATCH_TOKENS] &&
          m.kept[TAP_COUNT + TAP_DISPATCH_OFFSETS]);
    CHECK(count(&m) == 2 * MOST_LAYERS + 3);
}

static void test_without_a_shared_expert_the_output_is_the_gated_sum(void)
{
    config plain = a_config(0), shared = a_config(7);
    marks m;
    colibri_message message;
    CHECK_OK(resolve(&plain, "layers.1.moe.output", &m, &message), message);
    CHECK(m.kept[TAP_COUNT + TAP_MOE_ROUTED] && !m.kept[TAP_COUNT + TAP_MOE_OUTPUT]);
    CHECK_OK(resolve(&shared, "layers.1.moe.output", &m, &message), message);
    CHECK(!m.kept[TAP_COUNT + TAP_MOE_ROUTED] && m.kept[TAP_COUNT + TAP_MOE_OUTPUT]);
}

static void test_a_pattern_that_names_nothing_names_the_nearest_path(void)
{
    config c = a_config(0);
    marks m;
    colibri_message message;
    const struct {
        const char *pattern, *nearest;
    } wrong[] = {
        {"layers.1.moe.gate", "\"layers.1.moe.gates\""},
        {"layers.1.moe.router_logit", "\"layers.1.moe.router_logits\""},
        {"layers.*.moe.expertids", "\"layers.*.moe.expert_ids\""},
        {"layers.9.moe.gates", "moe.gates\""},
        {"layers.1.moe.experts.6.input", "\"layers.1.moe.experts.*.input\""},
        {"layers.2.moe.shared.gate", "\"layers.2.moe."},
        {"layers.0.moe.gates", "moe.gates\""},
        {"rooting", "\"routing\""},
        {"logit", "\"logits\""},
        {"", "none"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(resolve(&c, wrong[i].pattern, &m, &message) == COLIBRI_ERROR_ARGUMENT);
        CHECK_MESSAGE_HAS(message, wrong[i].nearest);
    }
}

int main(void)
{
    RUN(test_every_kind_has_a_path_of_its_own_and_a_place);
    RUN(test_row_shapes_follow_the_axes);
    RUN(test_levels_grow_and_always_hold_the_kv_cache);
    RUN(test_a_star_stands_for_any_run_of_characters);
    RUN(test_one_expert_by_name_keeps_the_packed_rows_of_its_layer);
    RUN(test_without_a_shared_expert_the_output_is_the_gated_sum);
    RUN(test_a_pattern_that_names_nothing_names_the_nearest_path);
    return 0;
}
