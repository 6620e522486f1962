/* A stepped pass gives the bytes of feed, whatever happens between its stages. */
#include <sys/wait.h>
#include <unistd.h>

#include "api/handles.h"
#include "check.h"
#include "support/stepped.h"

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
            for (int calls = 1;; calls++) { /* stopped at the first question, the second ... until there are no more */
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
            colibri_status status = again ? colibri_session_step(s, NULL, NULL, NULL, &message)
                                          : colibri_session_route_again(s, COLIBRI_GATES_MODEL, 2, 0, 8, true, &message);
            CHECK(status == COLIBRI_ERROR_ARGUMENT);
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
    return 0;
}
