/* A session is one timeline: what is refused leaves it as it was, what is shown never changes. */
#include "check.h"
#include "api/handles.h"
#include "support/snapshot.h"
#include "support/tiny_model.h"

static int64_t n_tokens_of(colibri_session *s)
{
    return colibri_session_length(s);
}

/* ---- what is refused ------------------------------------------------------------------------------------------------------- */

static void test_more_than_max_tokens_is_refused_with_both_numbers_and_the_session_goes_on(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    int32_t ids[12];
    colibri_message message;
    tiny_ids(ids, 12, &t, 1);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 10}),
                    *fresh = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 10});
    tiny_feed(s, ids, 8);
    CHECK(colibri_session_feed(s, ids + 8, 3, NULL, NULL, &message) == COLIBRI_ERROR_CAPACITY);
    CHECK_MESSAGE_HAS(message, "3 more tokens after 8");
    CHECK_MESSAGE_HAS(message, "max_tokens=10");
    CHECK(n_tokens_of(s) == 8 && colibri_session_pass_count(s) == 1);
    tiny_feed(s, ids + 8, 2);

    tiny_feed(fresh, ids, 8);
    tiny_feed(fresh, ids + 8, 2);
    snapshot a = snapshot_take(s), b = snapshot_take(fresh);
    snapshot_same(&a, &b, "after a refusal");
    snapshot_free(&a);
    snapshot_free(&b);
    colibri_session_release(s);
    colibri_session_release(fresh);
    tiny_close(m, &t);
}

static void test_a_token_id_out_of_range_is_named_with_its_index_and_the_vocabulary(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){.max_tokens = 8});
    colibri_message message;
    CHECK(colibri_session_feed(s, (int32_t[]){1, 2, 50}, 3, NULL, NULL, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "token id 50 at index 2");
    CHECK_MESSAGE_HAS(message, "vocab_size is 50");
    CHECK(colibri_session_feed(s, (int32_t[]){-1}, 1, NULL, NULL, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "token id -1 at index 0");
    CHECK(colibri_session_feed(s, NULL, 0, NULL, NULL, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(n_tokens_of(s) == 0);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_options_out_of_range_are_refused_by_name(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s;
    colibri_message message;
    colibri_session_options o = {.size = sizeof o + 8};
    CHECK(colibri_session_create(m, &o, &s, &message) == COLIBRI_ERROR_ARGUMENT && s == NULL);
    o = (colibri_session_options){.size = sizeof o, .threads = 1000};
    CHECK(colibri_session_create(m, &o, &s, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "threads is 1000");
    o = (colibri_session_options){.size = sizeof o, .max_tokens = -4};
    CHECK(colibri_session_create(m, &o, &s, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "max_tokens is -4");
    o = (colibri_session_options){.size = sizeof o, .gate_mode = (colibri_gate_mode)9};
    CHECK(colibri_session_create(m, &o, &s, &message) == COLIBRI_ERROR_ARGUMENT);
    o = (colibri_session_options){.size = offsetof(colibri_session_options, threads), .max_tokens = 5}; /* an older caller */
    CHECK_OK(colibri_session_create(m, &o, &s, &message), message);
    CHECK(colibri_session_max_tokens(s) == 5);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_what_cannot_fit_is_refused_in_bytes_and_zero_takes_what_fits(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s;
    colibri_message message;
    const char *const heavy[] = {"layers.*.attn.weights"};
    colibri_session_options o = {.size = sizeof o, .capture = heavy, .n_capture = 1, .max_tokens = 2000000000};
    CHECK(colibri_session_create(m, &o, &s, &message) == COLIBRI_ERROR_MEMORY);
    CHECK_MESSAGE_HAS(message, "bytes");
    CHECK_MESSAGE_HAS(message, "would fit");

    s = tiny_session(m, &(tiny_options){.capture = {"routing"}});
    CHECK(colibri_session_max_tokens(s) == t.max_positions);
    colibri_session_memory use = colibri_session_memory_use(s);
    int64_t kv = (int64_t)t.layers * 2 * t.kv_heads * t.head_dim * 4 * t.max_positions;
    CHECK(use.kv_cache == kv && use.tape > kv && use.reserved >= use.tape + use.scratch);
    colibri_session_release(s);
    tiny_close(m, &t);
}

/* ---- what is shown --------------------------------------------------------------------------------------------------------- */

static void test_a_tap_that_was_not_kept_says_which_capture_to_ask_for(void)
{
    tiny_checkpoint t = tiny_qwen2_moe();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"routing"}, .max_tokens = 8});
    colibri_array a;
    colibri_lease *lease;
    colibri_message message;
    tiny_feed(s, (int32_t[]){1, 2}, 2);
    CHECK(colibri_session_tap(s, tiny_kind("layers.{l}.moe.experts.{e}.input"), 2, 3, -1, &a, &lease, &message) ==
          COLIBRI_ERROR_NOT_CAPTURED);
    CHECK_MESSAGE_HAS(message, "\"layers.2.moe.experts.3.input\"");
    CHECK_MESSAGE_HAS(message, "capture \"moe\"");
    CHECK(colibri_session_tap(s, tiny_kind("layers.{l}.attn.weights"), 0, 0, -1, &a, &lease, &message) ==
          COLIBRI_ERROR_NOT_CAPTURED);
    CHECK_MESSAGE_HAS(message, "capture \"layers.0.attn.weights\"");
    CHECK(colibri_session_tap(s, tiny_kind("layers.{l}.moe.gates"), 1, 0, -1, &a, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "dense");
    CHECK(colibri_session_tap(s, tiny_kind("layers.{l}.moe.gates"), 3, 0, -1, &a, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "layers 0 to 2");
    CHECK(colibri_session_tap(s, tiny_kind("layers.{l}.moe.experts.{e}.input"), 0, 5, -1, &a, &lease, &message) ==
          COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "experts 0 to 4");
    CHECK(colibri_session_tap(s, tiny_kind("layers.{l}.moe.gates"), 0, 0, 1, &a, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "pass 1 does not exist");
    CHECK(colibri_session_captures(s, tiny_kind("layers.{l}.moe.gates"), 0) &&
          !colibri_session_captures(s, tiny_kind("layers.{l}.moe.gates"), 1));
    CHECK(!colibri_session_captures(s, tiny_kind("embed"), 0) && !colibri_session_captures(s, 1000, 0));
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_F4_an_expert_without_tokens_has_no_rows_of_the_right_width(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 8});
    colibri_lease *lease;
    int64_t rows = 0, empty = 0;
    colibri_array a = tiny_tap(s, "layers.{l}.moe.experts.{e}.output", 0, 0, -1, &lease); /* before any pass */
    CHECK(a.n_dims == 2 && a.shape[0] == 0 && a.shape[1] == t.hidden);
    colibri_lease_release(lease);

    tiny_feed(s, (int32_t[]){7}, 1);
    for (int e = 0; e < t.experts; e++) {
        a = tiny_tap(s, "layers.{l}.moe.experts.{e}.hidden", 1, e, -1, &lease);
        CHECK(a.n_dims == 2 && a.shape[1] == t.width && a.data != NULL);
        rows += a.shape[0];
        empty += a.shape[0] == 0;
        colibri_lease_release(lease);
    }
    CHECK(rows == t.top_k && empty == t.experts - t.top_k);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_packed_rows_lie_pass_by_pass_and_experts_are_pieces_of_them(void)
{
    tiny_checkpoint t = tiny_qwen3_moe();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"moe"}, .max_tokens = 32});
    int32_t ids[20];
    colibri_lease *held[4];
    tiny_ids(ids, 20, &t, 3);
    tiny_feed(s, ids, 12);
    tiny_feed(s, ids + 12, 8);
    colibri_array tokens = tiny_tap(s, "layers.{l}.moe.dispatch.tokens", 1, 0, -1, &held[0]);
    colibri_array offsets = tiny_tap(s, "layers.{l}.moe.dispatch.offsets", 1, 0, -1, &held[1]);
    colibri_array input = tiny_tap(s, "layers.{l}.moe.dispatch.input", 1, 0, -1, &held[2]);
    colibri_array from = tiny_tap(s, "layers.{l}.moe.input", 1, 0, -1, &held[3]);
    CHECK(tokens.shape[0] == 20 * t.top_k && input.shape[0] == 20 * t.top_k && input.shape[1] == t.hidden);
    CHECK(offsets.shape[0] == 2 && offsets.shape[1] == t.experts + 1);
    const int64_t *first = offsets.data;
    CHECK(first[0] == 0 && first[t.experts] == 12 * t.top_k && first[t.experts + 1] == 12 * t.top_k &&
          first[2 * t.experts + 1] == 20 * t.top_k);
    for (int64_t r = 0; r < 20 * t.top_k; r++) {
        int32_t token = ((const int32_t *)tokens.data)[r];
        CHECK(token >= (r < 12 * t.top_k ? 0 : 12) && token < (r < 12 * t.top_k ? 12 : 20));
        CHECK(memcmp((const float *)input.data + r * t.hidden, (const float *)from.data + token * t.hidden,
                     4 * (size_t)t.hidden) == 0);
    }
    for (int e = 0; e < t.experts; e++) {
        colibri_lease *lease;
        colibri_array rows = tiny_tap(s, "layers.{l}.moe.experts.{e}.input", 1, e, 0, &lease);
        CHECK(rows.data == (const float *)input.data + first[e] * t.hidden && rows.shape[0] == first[e + 1] - first[e]);
        colibri_lease_release(lease);
    }
    for (int i = 0; i < 4; i++)
        colibri_lease_release(held[i]);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_F2_a_kept_view_never_changes_while_a_thousand_tokens_run(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"moe"}, .max_tokens = 1100});
    static int32_t ids[1100];
    colibri_lease *lease, *logits_lease;
    colibri_array logits;
    colibri_message message;
    tiny_ids(ids, 1100, &t, 4);
    tiny_feed(s, ids, 30);
    colibri_array a = tiny_tap(s, "layers.{l}.moe.router_logits", 2, 0, -1, &lease);
    CHECK_OK(colibri_session_logits(s, &logits, &logits_lease, &message), message);
    size_t n = 30 * (size_t)t.experts * 4, n_logits = (size_t)t.vocab * 4;
    void *before = malloc(n), *logits_before = malloc(n_logits);
    memcpy(before, a.data, n);
    memcpy(logits_before, logits.data, n_logits);
    for (int i = 30; i < 1030; i++)
        tiny_feed(s, ids + i, 1);
    CHECK(a.shape[0] == 30 && memcmp(before, a.data, n) == 0);
    CHECK(memcmp(logits_before, logits.data, n_logits) == 0);
    free(before);
    free(logits_before);
    colibri_lease_release(lease);
    colibri_lease_release(logits_lease);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_a_lease_outlives_its_session_and_its_model(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 16}), *fresh;
    colibri_lease *lease;
    tiny_feed(s, (int32_t[]){3, 4, 5}, 3);
    colibri_array a = tiny_tap(s, "layers.{l}.output", 1, 0, -1, &lease);
    CHECK(colibri_model_users(m) == 2);
    colibri_session_release(s);
    CHECK(colibri_model_users(m) == 1);
    colibri_model_release(m); /* the opener goes; the lease still holds it */

    colibri_message message;
    CHECK_OK(colibri_model_open(t.folder, &m, &message), message);
    fresh = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 16});
    tiny_feed(fresh, (int32_t[]){3, 4, 5}, 3);
    colibri_lease *other;
    colibri_array b = tiny_tap(fresh, "layers.{l}.output", 1, 0, -1, &other);
    CHECK(memcmp(a.data, b.data, 3 * (size_t)t.hidden * 4) == 0);
    colibri_lease_release(other);
    colibri_lease_release(lease);
    colibri_session_release(fresh);
    tiny_close(m, &t);
}

/* ---- abandoned rows -------------------------------------------------------------------------------------------------------- */

static void test_truncate_reuses_rows_in_place_when_nobody_looks(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 16});
    colibri_message message;
    block *tape = s->inner->tape;
    tiny_feed(s, (int32_t[]){1, 2, 3}, 3);
    tiny_feed(s, (int32_t[]){4, 5}, 2);
    CHECK(colibri_session_truncate(s, 4, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "cannot keep 4 of 5 tokens");
    CHECK_MESSAGE_HAS(message, "nearest before is 3");
    CHECK(colibri_session_truncate(s, 6, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_truncate(s, -1, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_OK(colibri_session_truncate(s, 3, &message), message);
    CHECK(n_tokens_of(s) == 3 && colibri_session_pass_count(s) == 1);
    CHECK(s->inner->tape == tape && colibri_session_memory_use(s).copied_bytes == 0);
    CHECK_OK(colibri_session_truncate(s, 0, &message), message);
    CHECK(n_tokens_of(s) == 0 && colibri_session_pass_count(s) == 0);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_truncate_under_a_lease_leaves_the_old_view_as_it_was(void)
{
    tiny_checkpoint t = tiny_qwen2_moe();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all", "layers.*.attn.weights"}, .max_tokens = 16});
    colibri_session *fresh = tiny_session(m, &(tiny_options){{"all", "layers.*.attn.weights"}, .max_tokens = 16});
    colibri_message message;
    colibri_lease *lease;
    tiny_feed(s, (int32_t[]){1, 2, 3}, 3);
    tiny_feed(s, (int32_t[]){4, 5}, 2);
    colibri_array a = tiny_tap(s, "layers.{l}.output", 2, 0, -1, &lease);
    size_t n = 5 * (size_t)t.hidden * 4;
    void *before = malloc(n);
    memcpy(before, a.data, n);
    CHECK_OK(colibri_session_truncate(s, 3, &message), message);
    CHECK(colibri_session_memory_use(s).copied_bytes > 0);
    tiny_feed(s, (int32_t[]){9, 8, 7}, 3);
    CHECK(memcmp(before, a.data, n) == 0);

    tiny_feed(fresh, (int32_t[]){1, 2, 3}, 3);
    tiny_feed(fresh, (int32_t[]){9, 8, 7}, 3);
    snapshot x = snapshot_take(s), y = snapshot_take(fresh);
    snapshot_same(&x, &y, "after truncate");
    snapshot_free(&x);
    snapshot_free(&y);
    free(before);
    colibri_lease_release(lease);
    colibri_session_release(s);
    colibri_session_release(fresh);
    tiny_close(m, &t);
}

static void test_feeding_and_truncating_at_random_equals_feeding_what_was_kept(void)
{
    enum { rounds = 60, max_tokens = 40 };
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_message message;
    int32_t kept[max_tokens];
    int64_t stops[max_tokens + 1] = {0}, n_passes = 0;
    uint64_t state = 11;
    colibri_lease *lease = NULL;
    colibri_session *s =
        tiny_session(m, &(tiny_options){{"all", "layers.*.attn.weights"}, .threads = 2, .max_tokens = max_tokens});
    for (int round = 0; round < rounds; round++) {
        int64_t n = stops[n_passes], step = 1 + tiny_random(&state) % 7;
        if (n + step > max_tokens || tiny_random(&state) % 4 == 0) {
            n_passes = tiny_random(&state) % (uint32_t)(n_passes + 1);
            CHECK_OK(colibri_session_truncate(s, stops[n_passes], &message), message);
        } else {
            tiny_ids(kept + n, step, &t, tiny_random(&state));
            tiny_feed(s, kept + n, step);
            stops[++n_passes] = n + step;
        }
        if (tiny_random(&state) % 3 == 0) { /* somebody looks, or stops looking */
            colibri_lease_release(lease);
            lease = NULL;
            if (tiny_random(&state) % 2 == 0)
                tiny_tap(s, "layers.{l}.attn.k", 0, 0, -1, &lease);
        }
        CHECK(n_tokens_of(s) == stops[n_passes] && colibri_session_pass_count(s) == n_passes);
    }
    tiny_feed(s, kept, 0 < max_tokens - stops[n_passes] ? 1 : 0);
    memmove(kept + stops[n_passes], kept, sizeof *kept);
    stops[n_passes + 1] = stops[n_passes] + 1;
    colibri_session *fresh = tiny_session(m, &(tiny_options){{"all", "layers.*.attn.weights"}, .max_tokens = max_tokens});
    for (int64_t i = 0; i <= n_passes; i++)
        tiny_feed(fresh, kept + stops[i], stops[i + 1] - stops[i]);
    snapshot a = snapshot_take(s), b = snapshot_take(fresh);
    snapshot_same(&a, &b, "random walk");
    snapshot_free(&a);
    snapshot_free(&b);
    colibri_lease_release(lease);
    colibri_session_release(s);
    colibri_session_release(fresh);
    tiny_close(m, &t);
}

static void test_logits_of_abandoned_tokens_are_gone_unless_they_were_captured(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_message message;
    colibri_array a;
    colibri_lease *lease;
    colibri_session *s = tiny_session(m, &(tiny_options){{"none"}, .max_tokens = 16});
    colibri_session *keeps = tiny_session(m, &(tiny_options){{"logits"}, .max_tokens = 16});
    CHECK(colibri_session_logits(s, &a, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "no token");
    for (int i = 0; i < 2; i++) {
        tiny_feed(s, (int32_t[]){3, 4}, 2);
        tiny_feed(keeps, (int32_t[]){3, 4}, 2);
    }
    CHECK_OK(colibri_session_truncate(s, 2, &message), message);
    CHECK_OK(colibri_session_truncate(keeps, 2, &message), message);
    CHECK(colibri_session_logits(s, &a, &lease, &message) == COLIBRI_ERROR_NOT_CAPTURED);
    CHECK_MESSAGE_HAS(message, "logits");
    CHECK_OK(colibri_session_logits(keeps, &a, &lease, &message), message);
    CHECK(a.n_dims == 1 && a.shape[0] == t.vocab);
    colibri_lease_release(lease);
    colibri_session_release(s);
    colibri_session_release(keeps);
    tiny_close(m, &t);
}

static void test_A1_gate_mode_changes_gates_and_leaves_the_choice_of_the_first_layer(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *by_model = tiny_session(m, &(tiny_options){{"routing"}, .max_tokens = 8});
    colibri_session *raw = tiny_session(m, &(tiny_options){{"routing"}, .max_tokens = 8, .gates = COLIBRI_GATES_RAW_LOGITS});
    colibri_lease *held[5];
    tiny_feed(by_model, (int32_t[]){1, 2, 3}, 3);
    tiny_feed(raw, (int32_t[]){1, 2, 3}, 3);
    const int32_t *ids = tiny_tap(by_model, "layers.{l}.moe.expert_ids", 0, 0, -1, &held[0]).data;
    const int32_t *raw_ids = tiny_tap(raw, "layers.{l}.moe.expert_ids", 0, 0, -1, &held[1]).data;
    const float *gates = tiny_tap(by_model, "layers.{l}.moe.gates", 0, 0, -1, &held[2]).data;
    const float *raw_gates = tiny_tap(raw, "layers.{l}.moe.gates", 0, 0, -1, &held[3]).data;
    const float *logits = tiny_tap(raw, "layers.{l}.moe.router_logits", 0, 0, -1, &held[4]).data;
    for (int i = 0; i < 3 * t.top_k; i++) {
        CHECK(ids[i] == raw_ids[i] && raw_gates[i] == logits[i / t.top_k * t.experts + ids[i]]);
        CHECK(gates[i] > 0 && gates[i] < 1);
    }
    for (int i = 0; i < 5; i++)
        colibri_lease_release(held[i]);
    colibri_session_release(by_model);
    colibri_session_release(raw);
    tiny_close(m, &t);
}

int main(void)
{
    RUN(test_more_than_max_tokens_is_refused_with_both_numbers_and_the_session_goes_on);
    RUN(test_a_token_id_out_of_range_is_named_with_its_index_and_the_vocabulary);
    RUN(test_options_out_of_range_are_refused_by_name);
    RUN(test_what_cannot_fit_is_refused_in_bytes_and_zero_takes_what_fits);
    RUN(test_a_tap_that_was_not_kept_says_which_capture_to_ask_for);
    RUN(test_F4_an_expert_without_tokens_has_no_rows_of_the_right_width);
    RUN(test_packed_rows_lie_pass_by_pass_and_experts_are_pieces_of_them);
    RUN(test_F2_a_kept_view_never_changes_while_a_thousand_tokens_run);
    RUN(test_a_lease_outlives_its_session_and_its_model);
    RUN(test_truncate_reuses_rows_in_place_when_nobody_looks);
    RUN(test_truncate_under_a_lease_leaves_the_old_view_as_it_was);
    RUN(test_feeding_and_truncating_at_random_equals_feeding_what_was_kept);
    RUN(test_logits_of_abandoned_tokens_are_gone_unless_they_were_captured);
    RUN(test_A1_gate_mode_changes_gates_and_leaves_the_choice_of_the_first_layer);
    return 0;
}
