/* The rows of an open pass: what is written is seen, and what is changed in them is what later stages read. */
#include <math.h>

#include "check.h"
#include "support/stepped.h"

/* ---- edits ----------------------------------------------------------------------------------------------------------------- */

static void test_slots_without_an_expert_take_part_in_nothing(void)
{
    tiny_checkpoint t = tiny_qwen2_moe(); /* 3 of 5 experts, a shared one */
    colibri_model *m = tiny_open(&t);
    enum { n = 4, k = 3 };
    const tiny_options o = {{"all"}, .threads = 2, .max_tokens = 8};
    const int32_t ids[n] = {3, 1, 4, 1}, holes[] = {0, 4, 6, 7, 8}; /* of n * k slots; the third token has no expert at all */
    colibri_session *whole = tiny_session(m, &o), *s = tiny_session(m, &o);
    colibri_message message;
    tiny_feed(whole, ids, n);
    for (int round = 0; round < 2; round++) { /* the second on rows that were used before */
        begin(s, ids, n);
        step_to(s, COLIBRI_STAGE_DISPATCHER, 0);
        int32_t *chosen = edit(s, "layers.{l}.moe.expert_ids", 0);
        for (size_t i = 0; i < sizeof holes / sizeof *holes; i++)
            chosen[holes[i]] = -1;
        step_to(s, COLIBRI_STAGE_AGGREGATOR, 0);
        step(s);
        const float *gates = edit(s, "layers.{l}.moe.gates", 0), *routed = edit(s, "layers.{l}.moe.routed", 0);
        for (int token = 0; token < n; token++)
            for (int c = 0; c < t.hidden; c++) {
                float sum = 0;
                for (int slot = 0; slot < k; slot++) {
                    int32_t e = chosen[token * k + slot];
                    colibri_lease *tokens_lease, *output_lease;
                    if (e < 0)
                        continue;
                    colibri_array tokens = tiny_tap(whole, "layers.{l}.moe.experts.{e}.tokens", 0, e, 0, &tokens_lease),
                                  output = tiny_tap(whole, "layers.{l}.moe.experts.{e}.output", 0, e, 0, &output_lease);
                    int64_t row = 0;
                    while (((const int32_t *)tokens.data)[row] != token)
                        row++;
                    CHECK(row < tokens.shape[0]);
                    sum = fmaf(gates[token * k + slot], ((const float *)output.data)[row * t.hidden + c], sum);
                    colibri_lease_release(tokens_lease);
                    colibri_lease_release(output_lease);
                }
                CHECK(memcmp(&sum, &routed[token * t.hidden + c], sizeof sum) == 0);
            }
        finish(s);

        colibri_lease *lease;
        colibri_array tokens = tiny_tap(s, "layers.{l}.moe.dispatch.tokens", 0, 0, -1, &lease);
        for (int r = 0; r < n * k; r++)
            CHECK((((const int32_t *)tokens.data)[r] == -1) == (r >= n * k - 5));
        colibri_lease_release(lease);
        const char *const packed[] = {"input", "gate", "up", "hidden", "output"};
        for (int i = 0; i < 5; i++) {
            char path[64];
            snprintf(path, sizeof path, "layers.{l}.moe.dispatch.%s", packed[i]);
            colibri_array rows = tiny_tap(s, path, 0, 0, -1, &lease);
            const unsigned char *bytes = (const unsigned char *)rows.data + (n * k - 5) * rows.strides[0];
            for (int64_t b = 0; b < 5 * rows.strides[0]; b++)
                CHECK(bytes[b] == 0);
            colibri_lease_release(lease);
        }
        CHECK_OK(colibri_session_truncate(s, 0, &message), message);
        tiny_feed(s, ids, n); /* every row used */
        CHECK_OK(colibri_session_truncate(s, 0, &message), message);
    }
    colibri_session_release(whole);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_a_layer_in_which_no_slot_has_an_expert_goes_from_dispatcher_to_aggregator(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"none"}, .max_tokens = 4});
    const int32_t nobody[4] = {-1, -1, -1, -1};
    const colibri_array rows = {nobody, COLIBRI_I32, 2, {2, 2}, {8, 4}};
    colibri_array array;
    colibri_lease *lease;
    colibri_message message;
    begin(s, (int32_t[]){5, 6}, 2);
    step_to(s, COLIBRI_STAGE_DISPATCHER, 0);
    CHECK_OK(colibri_session_open_write(s, tiny_kind("layers.{l}.moe.expert_ids"), 0, 0, &rows, &message), message);
    step(s);
    CHECK(step(s).stage == COLIBRI_STAGE_AGGREGATOR);
    CHECK_OK(open_tap(s, "layers.{l}.moe.output", 0, 0, &array, &lease, &message), message);
    for (int64_t i = 0; i < 2 * t.hidden; i++)
        CHECK(((const float *)array.data)[i] == 0);
    colibri_lease_release(lease);
    finish(s);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_routing_again_is_routing(void)
{
    static const colibri_gate_mode modes[] = {COLIBRI_GATES_MODEL, COLIBRI_GATES_SOFTMAX, COLIBRI_GATES_SOFTMAX_RENORMALISED,
                                              COLIBRI_GATES_SOFTMAX_OF_CHOSEN, COLIBRI_GATES_RAW_LOGITS};
    for (int f = 0; f < N_FAMILIES; f++)
        for (int i = 0; i < 5; i++)
            for (int keep_ids = 0; keep_ids < 2; keep_ids++)
                for (int none = 0; none < 2; none++) { /* a session that keeps nothing has the same choice */
                    tiny_checkpoint t = families[f]();
                    colibri_model *m = tiny_open(&t);
                    const tiny_options as_asked = {{none ? "none" : "all"}, .max_tokens = N_IDS, .gates = modes[i]},
                                       as_model = {{none ? "none" : "all"}, .max_tokens = N_IDS};
                    int32_t ids[N_IDS];
                    tiny_ids(ids, N_IDS, &t, 10);
                    snapshot expected = fed(m, &as_asked, ids, 5);
                    colibri_session *s = tiny_session(m, &as_model);
                    colibri_message message;
                    for (int64_t first = 0, count = 5; first < N_IDS; first += count, count = N_IDS - 5) {
                        begin(s, ids + first, count);
                        while (is_open(s))
                            if (step(s).stage == COLIBRI_STAGE_ROUTER) { /* in two parts */
                                CHECK_OK(colibri_session_route_again(s, modes[i], t.top_k, 0, 2, keep_ids, &message), message);
                                CHECK_OK(colibri_session_route_again(s, modes[i], t.top_k, 2, count - 2, keep_ids, &message),
                                         message);
                            }
                    }
                    check_shows(s, &expected, "routed again");
                    colibri_session_release(s);
                    snapshot_free(&expected);
                    tiny_close(m, &t);
                }
}

static void test_fewer_experts_share_the_gates_among_them(void)
{
    tiny_checkpoint t = tiny_qwen2_moe(); /* 3 of 5 experts */
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 4});
    colibri_message message;
    begin(s, (int32_t[]){9, 2}, 2);
    step_to(s, COLIBRI_STAGE_DISPATCHER, 0);
    const float *logits = edit(s, "layers.{l}.moe.router_logits", 0), *gates = edit(s, "layers.{l}.moe.gates", 0);
    int32_t *chosen = edit(s, "layers.{l}.moe.expert_ids", 0), all[6];
    memcpy(all, chosen, sizeof all);
    CHECK_OK(colibri_session_route_again(s, COLIBRI_GATES_SOFTMAX_OF_CHOSEN, 2, 1, 1, false, &message), message);
    CHECK(memcmp(chosen, all, 5 * sizeof *all) == 0 && chosen[5] == -1 && gates[5] == 0);
    const float *z = logits + t.experts;
    double share = 1 / (1 + exp((double)z[chosen[4]] - (double)z[chosen[3]]));
    CHECK(fabs((double)gates[3] - share) < 1e-6 && fabs((double)gates[3] + (double)gates[4] - 1) < 1e-6);

    chosen[3] = -1; /* the first of three slots, of a token with ids of one's own */
    chosen[4] = all[5];
    chosen[5] = all[3];
    CHECK_OK(colibri_session_route_again(s, COLIBRI_GATES_SOFTMAX_RENORMALISED, 0, 1, 1, true, &message), message);
    share = 1 / (1 + exp((double)z[all[3]] - (double)z[all[5]]));
    CHECK(gates[3] == 0 && fabs((double)gates[4] - share) < 1e-6 && fabs((double)gates[5] + (double)gates[4] - 1) < 1e-6);
    CHECK(chosen[3] == -1 && chosen[4] == all[5] && chosen[5] == all[3]);
    chosen[4] = chosen[5] = -1;
    CHECK_OK(colibri_session_route_again(s, COLIBRI_GATES_SOFTMAX_RENORMALISED, 0, 1, 1, true, &message), message);
    CHECK(gates[3] == 0 && gates[4] == 0 && gates[5] == 0);
    finish(s);
    colibri_session_release(s);
    tiny_close(m, &t);
}

/* ---- open rows ------------------------------------------------------------------------------------------------------------- */

static bool same_rows(const colibri_array *a, const colibri_array *b)
{
    int64_t n = (int64_t)colibri_dtype_size(a->dtype);
    bool same = a->dtype == b->dtype && a->n_dims == b->n_dims;
    for (int i = 0; same && i < a->n_dims; i++) {
        same = a->shape[i] == b->shape[i];
        n *= a->shape[i];
    }
    return same && (n == 0 || memcmp(a->data, b->data, (size_t)n) == 0);
}

/* Looks at every tap of a session that keeps all, and of another one at the same place, and writes back what it finds. Returns
 * how many the other one could show. */
static int compare_open_rows(colibri_session *all, colibri_session *other, const tiny_checkpoint *t)
{
    size_t n_kinds;
    int n_shown = 0;
    const colibri_tap_kind *kinds = colibri_tap_kinds(&n_kinds);
    for (size_t kind = 0; kind < n_kinds; kind++)
        for (int64_t l = 0; l < t->layers; l++)
            for (int64_t e = 0; e < (kinds[kind].scope == COLIBRI_SCOPE_EXPERT ? t->experts : 1); e++) {
                colibri_array a, b;
                colibri_lease *la, *lb;
                colibri_message message;
                colibri_status sa = colibri_session_open_tap(all, kind, l, e, &a, &la, &message);
                colibri_status sb = colibri_session_open_tap(other, kind, l, e, &b, &lb, &message);
                if (kind == tiny_kind("layers.{l}.attn.weights"))
                    CHECK(sa == COLIBRI_ERROR_NOT_CAPTURED);
                else
                    CHECK(sa == COLIBRI_OK || sa == COLIBRI_ERROR_ARGUMENT);
                CHECK(sb == sa || sb == COLIBRI_ERROR_ARGUMENT || sb == COLIBRI_ERROR_NOT_CAPTURED ||
                      sa == COLIBRI_ERROR_NOT_CAPTURED);
                CHECK(sb != COLIBRI_ERROR_NOT_CAPTURED || !colibri_session_captures(other, kind, l));
                if (sa == COLIBRI_OK && sb == COLIBRI_OK) {
                    CHECK(same_rows(&a, &b));
                    bool index = strstr(kinds[kind].path, "tokens") != NULL || strstr(kinds[kind].path, "offsets") != NULL;
                    colibri_status written = colibri_session_open_write(other, kind, l, e, &a, &message);
                    CHECK(written == (index ? COLIBRI_ERROR_ARGUMENT : COLIBRI_OK));
                    colibri_array w;
                    colibri_lease *lw;
                    colibri_status edited = colibri_session_open_edit(other, kind, l, e, &w, &lw, &message);
                    CHECK(edited == (index                                        ? COLIBRI_ERROR_ARGUMENT
                                     : colibri_session_captures(other, kind, l) ? COLIBRI_OK
                                                                                : COLIBRI_ERROR_NOT_CAPTURED));
                    if (edited == COLIBRI_OK)
                        colibri_lease_release(lw);
                    n_shown++;
                }
                if (sa == COLIBRI_OK)
                    colibri_lease_release(la);
                if (sb == COLIBRI_OK)
                    colibri_lease_release(lb);
            }
    return n_shown;
}

static void test_every_tap_that_was_written_can_be_seen_at_every_place_and_written_back(void)
{
    for (int f = 0; f < 2; f++)
        for (int i = 0; i < N_CAPTURES; i++) {
            tiny_checkpoint t = families[f]();
            colibri_model *m = tiny_open(&t);
            int32_t ids[N_IDS];
            tiny_ids(ids, N_IDS, &t, 11);
            const tiny_options everything = {{"all"}, .max_tokens = N_IDS};
            colibri_session *all = tiny_session(m, &everything), *other = tiny_session(m, &captures[i]);
            snapshot expected = fed(m, &captures[i], ids, 5);
            tiny_feed(all, ids, 5);
            tiny_feed(other, ids, 5);
            begin(all, ids + 5, N_IDS - 5);
            begin(other, ids + 5, N_IDS - 5);
            CHECK(compare_open_rows(all, other, &t) == 0);
            step(all);
            for (step(other); is_open(other); step(other), step(all)) {
                CHECK(compare_open_rows(all, other, &t) > 0);
                for (int64_t l = 0; l < t.layers; l++) { /* what the stage just run wrote is there at every capture */
                    colibri_place next;
                    colibri_array a;
                    colibri_lease *lease;
                    colibri_message message;
                    colibri_session_next(other, &next);
                    if (next.layer != l || (next.stage != COLIBRI_STAGE_DISPATCHER && next.stage != COLIBRI_STAGE_RESIDUAL))
                        continue;
                    const char *path = next.stage == COLIBRI_STAGE_DISPATCHER ? "layers.{l}.moe.gates"
                                       : l == t.dense_layer                     ? "layers.{l}.mlp.output"
                                                                                : "layers.{l}.moe.output";
                    CHECK_OK(open_tap(other, path, l, 0, &a, &lease, &message), message);
                    CHECK(a.shape[0] == N_IDS - 5);
                    colibri_lease_release(lease);
                }
            }
            check_shows(other, &expected, "after all was written back");
            snapshot_free(&expected);
            colibri_session_release(all);
            colibri_session_release(other);
            tiny_close(m, &t);
        }
}

static void test_rows_of_another_shape_dtype_or_order_are_refused_and_rows_that_are_gone_too(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"none"}, .max_tokens = 4});
    static float rows[64];
    size_t gates = tiny_kind("layers.{l}.moe.gates");
    colibri_array array;
    colibri_lease *lease;
    colibri_message message;
    begin(s, (int32_t[]){1, 2, 3}, 3);
    step_to(s, COLIBRI_STAGE_DISPATCHER, 0);
    CHECK(colibri_session_open_write(s, gates, 0, 0, &(colibri_array){rows, COLIBRI_F32, 2, {2, 2}, {8, 4}}, &message) ==
          COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "float32 (3, 2), contiguous; given is float32 (2, 2)");
    CHECK(colibri_session_open_write(s, gates, 0, 0, &(colibri_array){rows, COLIBRI_I32, 2, {3, 2}, {8, 4}}, &message) ==
          COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_open_write(s, gates, 0, 0, &(colibri_array){rows, COLIBRI_F32, 2, {3, 2}, {4, 12}}, &message) ==
          COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_open_write(s, gates, 0, 0, &(colibri_array){rows, COLIBRI_F32, 1, {6}, {4}}, &message) ==
          COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_open_write(s, gates, 0, 0, &(colibri_array){rows, COLIBRI_F32, 9, {3, 2}, {8, 4}}, &message) ==
          COLIBRI_ERROR_ARGUMENT);
    CHECK(open_tap(s, "layers.{l}.moe.gates", 1, 0, &array, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "is not written yet");
    CHECK(colibri_session_open_edit(s, gates, 0, 0, &array, &lease, &message) == COLIBRI_ERROR_NOT_CAPTURED);
    step_to(s, COLIBRI_STAGE_DISPATCHER, 1);
    CHECK(open_tap(s, "layers.{l}.moe.gates", 0, 0, &array, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "is gone");
    CHECK(open_tap(s, "layers.{l}.moe.experts.{e}.up", 0, 0, &array, &lease, &message) == COLIBRI_ERROR_NOT_CAPTURED);
    finish(s);
    CHECK(open_tap(s, "layers.{l}.moe.gates", 1, 0, &array, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    colibri_session_release(s);
    tiny_close(m, &t);
}

int main(void)
{
    RUN(test_slots_without_an_expert_take_part_in_nothing);
    RUN(test_a_layer_in_which_no_slot_has_an_expert_goes_from_dispatcher_to_aggregator);
    RUN(test_routing_again_is_routing);
    RUN(test_fewer_experts_share_the_gates_among_them);
    RUN(test_every_tap_that_was_written_can_be_seen_at_every_place_and_written_back);
    RUN(test_rows_of_another_shape_dtype_or_order_are_refused_and_rows_that_are_gone_too);
    return 0;
}
