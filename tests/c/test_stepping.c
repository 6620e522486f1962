/* A stepped pass gives the bytes of feed, whatever happens between its stages; what is changed in its open rows is what later
 * stages read. */
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "api/handles.h"
#include "check.h"
#include "support/snapshot.h"
#include "support/tiny_model.h"

enum { N_IDS = 14 };

static tiny_checkpoint (*const families[])(void) = {tiny_mixtral, tiny_qwen2_moe, tiny_qwen3_moe, tiny_olmoe};
enum { N_FAMILIES = (int)(sizeof families / sizeof *families) };

static const tiny_options captures[] = {
    {{"none"}, 1, N_IDS, 0},
    {{"routing"}, 3, N_IDS, 0},
    {{"moe"}, 1, N_IDS, 0},
    {{"all"}, 3, N_IDS, 0},
    {{"layers.*.attn.weights", "layers.0.moe.gates", "layers.0.moe.experts.*.up", "logits"}, 2, N_IDS, 0},
};
enum { N_CAPTURES = (int)(sizeof captures / sizeof *captures) };

static colibri_place step(colibri_session *s)
{
    colibri_place next, done;
    colibri_message message;
    CHECK(colibri_session_next(s, &next));
    CHECK_OK(colibri_session_step(s, NULL, NULL, &done, &message), message);
    CHECK(memcmp(&next, &done, sizeof done) == 0);
    return done;
}

static void begin(colibri_session *s, const int32_t *ids, int64_t n)
{
    colibri_message message;
    CHECK_OK(colibri_session_begin(s, ids, n, &message), message);
}

static bool is_open(colibri_session *s)
{
    colibri_place next;
    return colibri_session_next(s, &next);
}

static int finish(colibri_session *s)
{
    int n_steps = 0;
    for (; is_open(s); n_steps++)
        step(s);
    return n_steps;
}

/* Steps until `stage` of `layer` is next. */
static void step_to(colibri_session *s, colibri_stage stage, int64_t layer)
{
    colibri_place next;
    while (colibri_session_next(s, &next) && !(next.stage == stage && next.layer == layer))
        step(s);
    CHECK(next.stage == stage);
}

/* Feeds the ids in two passes, the first of them `first` long. */
static snapshot fed(colibri_model *m, const tiny_options *o, const int32_t *ids, int64_t first)
{
    colibri_session *s = tiny_session(m, o);
    tiny_feed(s, ids, first);
    tiny_feed(s, ids + first, N_IDS - first);
    snapshot shown = snapshot_take(s);
    colibri_session_release(s);
    return shown;
}

static void check_shows(colibri_session *s, const snapshot *expected, const char *what)
{
    snapshot shown = snapshot_take(s);
    CHECK(shown.n == expected->n && snapshot_same(&shown, expected, what) > 0);
    snapshot_free(&shown);
}

static colibri_status open_tap(colibri_session *s, const char *path, int64_t layer, int64_t expert, colibri_array *array,
                               colibri_lease **lease, colibri_message *message)
{
    return colibri_session_open_tap(s, tiny_kind(path), layer, expert, array, lease, message);
}

/* A writable look at int32 or float rows of a kept tap; the lease goes at once, since the session lives on. */
static void *edit(colibri_session *s, const char *path, int64_t layer)
{
    colibri_array array;
    colibri_lease *lease;
    colibri_message message;
    CHECK_OK(colibri_session_open_edit(s, tiny_kind(path), layer, 0, &array, &lease, &message), message);
    colibri_lease_release(lease);
    return (unsigned char *)block_data(s->inner->tape) + ((const unsigned char *)array.data - block_data(s->inner->tape));
}

/* ---- the same bytes -------------------------------------------------------------------------------------------------------- */

static void test_stepping_gives_the_bytes_of_feed(void)
{
    for (int f = 0; f < N_FAMILIES; f++) {
        tiny_checkpoint t = families[f]();
        colibri_model *m = tiny_open(&t);
        int32_t ids[N_IDS];
        tiny_ids(ids, N_IDS, &t, 3);
        for (int i = 0; i < N_CAPTURES; i++)
            for (int64_t first = 1; first < N_IDS; first += 6) {
                snapshot expected = fed(m, &captures[i], ids, first);
                colibri_session *s = tiny_session(m, &captures[i]);
                begin(s, ids, first);
                finish(s);
                begin(s, ids + first, N_IDS - first);
                finish(s);
                CHECK(colibri_session_length(s) == N_IDS && colibri_session_pass_count(s) == 2);
                check_shows(s, &expected, t.model_type);
                colibri_session_release(s);
                snapshot_free(&expected);
            }
        tiny_close(m, &t);
    }
}

static void test_the_stages_come_in_their_order_and_each_expert_with_rows_once(void)
{
    tiny_checkpoint t = tiny_qwen2_moe(); /* layer 1 is dense, the others have a shared expert */
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"moe"}, .max_tokens = 4});
    static const colibri_stage moe[] = {COLIBRI_STAGE_ATTENTION, COLIBRI_STAGE_ROUTER, COLIBRI_STAGE_DISPATCHER,
                                        COLIBRI_STAGE_EXPERT,    COLIBRI_STAGE_SHARED, COLIBRI_STAGE_AGGREGATOR,
                                        COLIBRI_STAGE_RESIDUAL},
                               dense[] = {COLIBRI_STAGE_ATTENTION, COLIBRI_STAGE_MLP, COLIBRI_STAGE_RESIDUAL};
    begin(s, (int32_t[]){7}, 1);
    CHECK(step(s).stage == COLIBRI_STAGE_EMBED);
    for (int l = 0; l < t.layers; l++)
        for (int i = 0; i < (l == t.dense_layer ? 3 : 7); i++) {
            colibri_stage stage = l == t.dense_layer ? dense[i] : moe[i];
            int64_t before = -1;
            for (int n = 0; n < (stage == COLIBRI_STAGE_EXPERT ? t.top_k : 1); n++) { /* one token: k experts of one row */
                colibri_place done = step(s);
                CHECK(done.stage == stage && done.layer == l);
                CHECK(stage == COLIBRI_STAGE_EXPERT ? done.expert > before : done.expert == -1);
                before = done.expert;
            }
        }
    CHECK(step(s).stage == COLIBRI_STAGE_NORM && step(s).stage == COLIBRI_STAGE_LOGITS && !is_open(s));
    CHECK(strcmp(colibri_stage_name(COLIBRI_STAGE_SHARED), "shared") == 0);
    CHECK(strcmp(colibri_stage_name((colibri_stage)99), "none") == 0);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static int stop_at_call(void *user, double done)
{
    CHECK(done >= 0 && done < 1);
    return --*(int *)user == 0;
}

static void test_an_interrupted_stage_runs_again(void)
{
    tiny_checkpoint t = tiny_qwen2_moe();
    colibri_model *m = tiny_open(&t);
    int32_t ids[N_IDS];
    tiny_ids(ids, N_IDS, &t, 4);
    for (int i = 0; i < N_CAPTURES; i++) {
        snapshot expected = fed(m, &captures[i], ids, 5);
        colibri_session *s = tiny_session(m, &captures[i]);
        s->inner->machine.interval_ns = 0; /* asks at every block of work */
        tiny_feed(s, ids, 5);
        begin(s, ids + 5, N_IDS - 5);
        int n_interrupts = 0;
        while (is_open(s)) {
            colibri_place before, after;
            colibri_message message;
            for (int calls = 1;; calls++) { /* stopped at the first question, the second ... until the stage has no more of them */
                int left = calls;
                colibri_session_next(s, &before);
                colibri_status status = colibri_session_step(s, stop_at_call, &left, NULL, &message);
                if (status == COLIBRI_OK)
                    break;
                CHECK(status == COLIBRI_ERROR_INTERRUPTED && colibri_session_length(s) == 5);
                CHECK(colibri_session_next(s, &after) && memcmp(&before, &after, sizeof before) == 0);
                n_interrupts++;
            }
        }
        CHECK(n_interrupts > 20);
        check_shows(s, &expected, "after interrupts");
        colibri_session_release(s);
        snapshot_free(&expected);
    }
    tiny_close(m, &t);
}

/* ---- abandon, fork, move --------------------------------------------------------------------------------------------------- */

static void test_an_abandoned_pass_leaves_the_session_as_it_was_and_what_was_shown_of_it(void)
{
    tiny_checkpoint t = tiny_qwen2_moe();
    colibri_model *m = tiny_open(&t);
    int32_t ids[N_IDS], others[N_IDS];
    tiny_ids(ids, N_IDS, &t, 5);
    tiny_ids(others, N_IDS, &t, 6);
    for (int i = 0; i < N_CAPTURES; i++) {
        snapshot expected = fed(m, &captures[i], ids, 5);
        colibri_session *s = tiny_session(m, &captures[i]);
        tiny_feed(s, ids, 5);
        snapshot before = snapshot_take(s);
        int n_steps = 1;
        for (int n = 0; n < n_steps; n++) {
            colibri_array k = {0};
            colibri_lease *lease = NULL;
            colibri_message message;
            unsigned char shown[512];
            begin(s, others, 6);
            for (int done = 0; done < n && is_open(s); done++)
                step(s);
            if (n > 1) { /* the attention of layer 0 was run */
                CHECK_OK(open_tap(s, "layers.{l}.attn.k", 0, 0, &k, &lease, &message), message);
                CHECK(k.shape[0] == 6 && k.strides[0] * 6 < (int64_t)sizeof shown);
                memcpy(shown, k.data, (size_t)(k.strides[0] * 6));
            }
            CHECK_OK(n % 2 == 0 ? colibri_session_abandon(s, &message) : colibri_session_truncate(s, 5, &message), message);
            CHECK(!is_open(s) && colibri_session_length(s) == 5 && colibri_session_truncations(s) == 0);
            check_shows(s, &before, "abandoned");
            begin(s, ids + 5, 4);
            if (n_steps == 1)
                n_steps = finish(s);
            else
                finish(s);
            CHECK_OK(colibri_session_truncate(s, 5, &message), message);
            if (lease != NULL)
                CHECK(memcmp(shown, k.data, (size_t)(k.strides[0] * 6)) == 0);
            colibri_lease_release(lease);
            tiny_feed(s, ids + 5, N_IDS - 5);
            check_shows(s, &expected, "after an abandoned pass");
            colibri_session_release(s);
            s = tiny_session(m, &captures[i]);
            tiny_feed(s, ids, 5);
        }
        colibri_session_release(s);
        snapshot_free(&before);
        snapshot_free(&expected);
    }
    tiny_close(m, &t);
}

static void test_a_fork_shows_what_its_parent_shows_and_goes_its_own_way(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    int32_t ids[N_IDS];
    colibri_message message;
    tiny_ids(ids, N_IDS, &t, 7);
    for (int i = 0; i < N_CAPTURES; i++) {
        snapshot expected = fed(m, &captures[i], ids, 6);
        colibri_session *s = tiny_session(m, &captures[i]), *same, *shorter, *none;
        tiny_feed(s, ids, 6);
        begin(s, ids + 6, 3); /* a pass that is open is not part of the past */
        step_to(s, COLIBRI_STAGE_AGGREGATOR, 1);
        snapshot before = snapshot_take(s);
        CHECK_OK(colibri_session_fork(s, 6, &same, &message), message);
        CHECK_OK(colibri_session_fork(s, 0, &shorter, &message), message);
        CHECK(colibri_session_fork(s, 4, &none, &message) == COLIBRI_ERROR_ARGUMENT && none == NULL);
        CHECK_MESSAGE_HAS(message, "no pass ends there");
        CHECK(colibri_session_memory_use(same).copied_bytes > 0 && colibri_session_threads_asked(same) == captures[i].threads);
        CHECK(colibri_session_max_tokens(same) == N_IDS && colibri_session_length(shorter) == 0 && !is_open(same));
        check_shows(same, &before, "fork");
        tiny_feed(same, ids + 6, N_IDS - 6);
        check_shows(same, &expected, "fork, then the same tokens");
        tiny_feed(shorter, (int32_t[]){1, 2}, 2);
        check_shows(s, &before, "the parent of two forks");
        CHECK_OK(colibri_session_abandon(s, &message), message);
        tiny_feed(s, ids + 6, N_IDS - 6);
        check_shows(s, &expected, "the parent");
        colibri_session_release(s);
        check_shows(same, &expected, "an orphan");
        colibri_session_release(same);
        colibri_session_release(shorter);
        snapshot_free(&before);
        snapshot_free(&expected);
    }
    tiny_close(m, &t);
}

static void test_a_session_that_moved_is_out_of_reach_of_writable_views(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = 6});
    colibri_array array;
    colibri_lease *lease;
    colibri_message message;
    begin(s, (int32_t[]){1, 2, 3}, 3);
    step_to(s, COLIBRI_STAGE_DISPATCHER, 0);
    float *gates = edit(s, "layers.{l}.moe.gates", 0);
    CHECK_OK(open_tap(s, "layers.{l}.moe.gates", 0, 0, &array, &lease, &message), message);
    CHECK(colibri_session_move(s, &message) == COLIBRI_ERROR_BUSY);
    finish(s);
    snapshot before = snapshot_take(s);
    CHECK_OK(colibri_session_move(s, &message), message);
    for (int i = 0; i < 6; i++)
        gates[i] = -1; /* the block is held by the lease alone */
    check_shows(s, &before, "moved");
    int64_t copied = colibri_session_memory_use(s).copied_bytes;
    CHECK_OK(colibri_session_move(s, &message), message); /* nobody looks: it stays where it is */
    CHECK(copied > 0 && colibri_session_memory_use(s).copied_bytes == copied);
    colibri_lease_release(lease);
    snapshot_free(&before);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_a_child_forked_off_within_a_pass_finishes_it_or_is_refused(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    const tiny_options o = {{"all"}, .threads = 3, .max_tokens = N_IDS};
    int32_t ids[N_IDS];
    tiny_ids(ids, N_IDS, &t, 8);
    snapshot expected = fed(m, &o, ids, 6);
    colibri_session *s = tiny_session(m, &o);
    tiny_feed(s, ids, 6);
    begin(s, ids + 6, N_IDS - 6);
    step_to(s, COLIBRI_STAGE_AGGREGATOR, 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        finish(s);
        check_shows(s, &expected, "in a child");
        s->inner->busy = 1; /* as if a thread of the parent had been inside */
        s->inner->process = getppid();
        colibri_message message;
        CHECK(colibri_session_begin(s, ids, 1, &message) == COLIBRI_ERROR_BUSY);
        CHECK_MESSAGE_HAS(message, "forked");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    finish(s);
    check_shows(s, &expected, "in the parent");
    colibri_session_release(s);
    snapshot_free(&expected);
    tiny_close(m, &t);
}

/* ---- what is refused ------------------------------------------------------------------------------------------------------- */

static void test_what_has_no_place_in_or_out_of_an_open_pass_is_refused(void)
{
    tiny_checkpoint t = tiny_mixtral();
    t.max_positions = 2000;
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"routing"}, .max_tokens = 1000});
    colibri_array array;
    colibri_lease *lease;
    colibri_message message;
    static int32_t ids[600];
    int64_t start, stop;
    CHECK(colibri_session_step(s, NULL, NULL, NULL, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "no pass is open");
    CHECK(open_tap(s, "embed", 0, 0, &array, &lease, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_route_again(s, COLIBRI_GATES_MODEL, 1, 0, 0, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_begin(s, ids, 0, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_begin(s, (int32_t[]){-3}, 1, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_begin(s, ids, 600, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "600 tokens");
    CHECK_MESSAGE_HAS(message, "512");
    CHECK_MESSAGE_HAS(message, "capture \"moe\" or \"all\"");
    CHECK(!colibri_session_open_pass(s, &start, &stop));

    tiny_feed(s, ids, 2);
    begin(s, ids, 3);
    CHECK(colibri_session_open_pass(s, &start, &stop) && start == 2 && stop == 5);
    step_to(s, COLIBRI_STAGE_ROUTER, 1);
    CHECK(colibri_session_feed(s, ids, 1, NULL, NULL, &message) == COLIBRI_ERROR_BUSY);
    CHECK_MESSAGE_HAS(message, "a pass is open before layer 1, router: finish or abandon it");
    CHECK(colibri_session_begin(s, ids, 1, &message) == COLIBRI_ERROR_BUSY);
    CHECK(colibri_session_route_again(s, COLIBRI_GATES_MODEL, 1, 0, 1, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "before layer 1, router");
    CHECK(colibri_session_truncate(s, 1, &message) == COLIBRI_ERROR_ARGUMENT && is_open(s));

    step(s);
    CHECK(colibri_session_route_again(s, (colibri_gate_mode)7, 1, 0, 1, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_route_again(s, COLIBRI_GATES_MODEL, 3, 0, 1, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "1 to 2 experts");
    CHECK(colibri_session_route_again(s, COLIBRI_GATES_MODEL, 0, 0, 1, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_route_again(s, COLIBRI_GATES_MODEL, 1, 2, 2, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_route_again(s, COLIBRI_GATES_MODEL, 1, -1, 1, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK(colibri_session_route_again(s, COLIBRI_GATES_MODEL, 1, 1, INT64_MAX, false, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_OK(colibri_session_truncate(s, 0, &message), message);
    CHECK(!is_open(s) && colibri_session_length(s) == 0);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_expert_ids_that_are_none_are_named_and_the_pass_goes_on_once_they_are_right(void)
{
    tiny_checkpoint t = tiny_mixtral(); /* 2 of 6 experts */
    colibri_model *m = tiny_open(&t);
    int32_t ids[N_IDS];
    tiny_ids(ids, N_IDS, &t, 9);
    const tiny_options o = {{"all"}, .threads = 2, .max_tokens = N_IDS};
    snapshot expected = fed(m, &o, ids, 6);
    colibri_session *s = tiny_session(m, &o);
    colibri_message message;
    tiny_feed(s, ids, 6);
    begin(s, ids + 6, N_IDS - 6);
    step_to(s, COLIBRI_STAGE_DISPATCHER, 1);
    int32_t *chosen = edit(s, "layers.{l}.moe.expert_ids", 1);
    const int32_t good[2] = {chosen[4], chosen[5]}, bad[][2] = {{99, 0},        {0, 6},         {-2, 1},
                                                                {1, INT32_MIN}, {INT32_MAX, 2}, {3, 3}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (int again = 0; again < 2; again++) {
            colibri_place next;
            memcpy(chosen + 4, bad[i], sizeof bad[i]); /* the third token of the pass */
            CHECK((again ? colibri_session_step(s, NULL, NULL, NULL, &message)
                         : colibri_session_route_again(s, COLIBRI_GATES_MODEL, 2, 0, 8, true, &message)) == COLIBRI_ERROR_ARGUMENT);
            CHECK_MESSAGE_HAS(message, "layers.1.moe.expert_ids: token 8 names expert");
            CHECK_MESSAGE_HAS(message, i == 5 ? "in slot 0 and again in slot 1" : "experts 0 to 5");
            CHECK(colibri_session_next(s, &next) && next.stage == COLIBRI_STAGE_DISPATCHER && next.layer == 1);
        }
    memcpy(chosen + 4, good, sizeof good);
    finish(s);
    check_shows(s, &expected, "after ids that are none");
    colibri_session_release(s);
    snapshot_free(&expected);
    tiny_close(m, &t);
}

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

/* Looks at every tap of a session that keeps all, and of one that keeps what `o` says, both at the same place; writes back what it
 * finds. Returns how many the other one could show. */
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
    RUN(test_stepping_gives_the_bytes_of_feed);
    RUN(test_the_stages_come_in_their_order_and_each_expert_with_rows_once);
    RUN(test_an_interrupted_stage_runs_again);
    RUN(test_an_abandoned_pass_leaves_the_session_as_it_was_and_what_was_shown_of_it);
    RUN(test_a_fork_shows_what_its_parent_shows_and_goes_its_own_way);
    RUN(test_a_session_that_moved_is_out_of_reach_of_writable_views);
    RUN(test_a_child_forked_off_within_a_pass_finishes_it_or_is_refused);
    RUN(test_what_has_no_place_in_or_out_of_an_open_pass_is_refused);
    RUN(test_expert_ids_that_are_none_are_named_and_the_pass_goes_on_once_they_are_right);
    RUN(test_slots_without_an_expert_take_part_in_nothing);
    RUN(test_a_layer_in_which_no_slot_has_an_expert_goes_from_dispatcher_to_aggregator);
    RUN(test_routing_again_is_routing);
    RUN(test_fewer_experts_share_the_gates_among_them);
    RUN(test_every_tap_that_was_written_can_be_seen_at_every_place_and_written_back);
    RUN(test_rows_of_another_shape_dtype_or_order_are_refused_and_rows_that_are_gone_too);
    return 0;
}
