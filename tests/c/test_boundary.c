/* test_boundary.c: pieces are counted the same however they are cut, and the counts of a session follow its passes. */
#include "core/boundary.h"

#include <math.h>

#include "check.h"
#include "support/stepped.h"

/* ---- pieces ---------------------------------------------------------------------------------------------------------------- */

enum { LAYERS = 2, THREADS = 3, ROWS = 7, COLS = 19, TOKEN = 40 };

typedef struct bench {
    config config;
    boundary boundary;
    void *tables, *passes, *threads;
} bench;

static void bench_new(bench *b, colibri_watch watch)
{
    memset(b, 0, sizeof *b);
    b->config.num_hidden_layers = LAYERS;
    for (int l = 0; l < LAYERS; l++)
        b->config.is_moe[l] = true;
    b->boundary.watch = watch;
    b->tables = malloc((size_t)(boundary_table_bytes(&b->config) * 3));
    b->passes = malloc((size_t)(boundary_pass_bytes(&b->config) * 2));
    b->threads = malloc((size_t)(boundary_thread_bytes() * THREADS));
    CHECK(b->tables != NULL && b->passes != NULL && b->threads != NULL);
    boundary_init(&b->boundary, &b->config, THREADS, b->tables, b->passes, b->threads);
}

static void bench_free(bench *b)
{
    free(b->tables);
    free(b->passes);
    free(b->threads);
}

static colibri_watch_row row_of(const boundary *b, point p, int64_t layer)
{
    static colibri_watch_row rows[LAYERS * POINT_COUNT];
    size_t n = boundary_table(b, rows, LAYERS * POINT_COUNT);
    for (size_t i = 0; i < n; i++)
        if (rows[i].point == p && rows[i].layer == layer)
            return rows[i];
    CHECK(false);
    return rows[0];
}

static bool same_rows(const colibri_watch_row *a, const colibri_watch_row *b)
{
    return a->n == b->n && a->n_nan == b->n_nan && a->n_signalling == b->n_signalling && a->n_inf == b->n_inf &&
           a->n_negative_inf == b->n_negative_inf && a->n_subnormal == b->n_subnormal && a->token == b->token &&
           a->expert == b->expert && a->index == b->index && a->largest == b->largest && a->bits == b->bits;
}

/* One pass of one stage: cells rows first .. last - 1 and columns from .. to of x, one after the other on changing threads. */
static void pass(boundary *b, float *x, int64_t row_step, int64_t col_step, point p, const int32_t *tokens)
{
    int thread = 0;
    boundary_begin_pass(b);
    boundary_begin_stage(b, 1, TOKEN);
    for (int64_t from = 0; from < COLS; from += col_step)
        for (int64_t r = ROWS; r > 0; r -= row_step) { /* later rows first */
            int64_t first = r > row_step ? r - row_step : 0, to = from + col_step < COLS ? from + col_step : COLS;
            boundary_piece(b, thread++ % THREADS, p,
                           &(piece){x + first * COLS + from, r - first, to - from, COLS, first,
                                    tokens != NULL ? tokens + first : NULL, tokens != NULL ? 5 : -1, from});
            if (first == 0)
                break;
        }
    CHECK(boundary_end_stage(b, true));
    boundary_close_pass(b, 0);
    boundary_add_pass(b);
}

static void test_counts_do_not_depend_on_how_rows_were_cut(void)
{
    static const uint32_t sick[] = {0x7fc12345, 0x7f800001, 0xff800000, 0x7f800000, 0x00000001, 0xffc00000};
    float x[ROWS * COLS];
    const int32_t tokens[ROWS] = {41, 43, 44, 50, 51, 52, 60};
    for (int64_t round = 0; round < 60; round++) {
        uint64_t state = (uint64_t)round + 1;
        for (int64_t i = 0; i < ROWS * COLS; i++)
            x[i] = (float)tiny_random(&state) - 2e9f;
        for (int64_t k = 0; k < round % 5; k++)
            memcpy(&x[tiny_random(&state) % (ROWS * COLS)], &sick[tiny_random(&state) % 6], sizeof *x);
        for (int packed = 0; packed < 2; packed++) {
            bench whole, cut;
            const point p = packed ? POINT_EXPERT_GATE : POINT_OUTPUT;
            bench_new(&whole, COLIBRI_WATCH_COUNT);
            bench_new(&cut, COLIBRI_WATCH_COUNT);
            pass(&whole.boundary, x, ROWS, COLS, p, packed ? tokens : NULL);
            pass(&cut.boundary, x, 1 + round % 4, 1 + round % 7, p, packed ? tokens : NULL);
            colibri_watch_row a = row_of(&whole.boundary, p, 1), b = row_of(&cut.boundary, p, 1);
            CHECK(a.n == ROWS * COLS && same_rows(&a, &b));

            int64_t first = 0;
            while (first < ROWS * COLS && isfinite(x[first]))
                first++;
            if (first == ROWS * COLS) {
                CHECK(a.token == -1 && a.expert == -1 && a.index == -1 && a.n_nan + a.n_inf == 0);
            } else {
                CHECK(a.token == (packed ? tokens[first / COLS] : TOKEN + first / COLS) && a.index == first % COLS);
                CHECK(a.expert == (packed ? 5 : -1) && (!isnan(x[first]) || a.bits == 0x7fc00000 || a.bits == 0x7f800001));
            }
            bench_free(&whole);
            bench_free(&cut);
        }
    }
}

static void test_the_first_value_is_the_one_of_the_least_token_then_expert_then_index(void)
{
    bench b;
    float nan = NAN;
    const int32_t tokens[] = {45, 44, 44, 44};
    const int64_t experts[] = {0, 7, 3, 3}, indices[] = {0, 1, 9, 4};
    bench_new(&b, COLIBRI_WATCH_COUNT);
    boundary_begin_pass(&b.boundary);
    boundary_begin_stage(&b.boundary, 0, TOKEN);
    for (int i = 0; i < 4; i++)
        boundary_piece(&b.boundary, i % THREADS, POINT_EXPERT_UP, &(piece){&nan, 1, 1, 1, 0, &tokens[i], experts[i], indices[i]});
    CHECK(boundary_end_stage(&b.boundary, true));
    boundary_add_pass(&b.boundary);
    colibri_watch_row r = row_of(&b.boundary, POINT_EXPERT_UP, 0);
    CHECK(r.n == 4 && r.n_nan == 4 && r.token == 44 && r.expert == 3 && r.index == 4);
    bench_free(&b);
}

static void test_a_stage_that_stops_is_not_counted_and_names_its_first_point(void)
{
    bench b;
    float values[2] = {1, -INFINITY};
    colibri_message message;
    bench_new(&b, COLIBRI_WATCH_STOP);
    boundary_begin_pass(&b.boundary);
    boundary_begin_stage(&b.boundary, 1, TOKEN);
    boundary_piece(&b.boundary, 2, POINT_ATTN_OUT, &(piece){values, 1, 2, 2, 3, NULL, -1, 0});
    boundary_piece(&b.boundary, 1, POINT_ATTN_SCORES, &(piece){values, 1, 2, 2, 3, NULL, -1, 2 * 44 + 9});
    CHECK(!boundary_end_stage(&b.boundary, true));
    CHECK(boundary_fail(&b.boundary, "so it is", &message) == COLIBRI_ERROR_NONFINITE);
    CHECK(strcmp(message.text, "\"layers.1.attn.scores\" is not finite: -Inf at token 43, index 98 (head 2, key 10); so it is") == 0);
    boundary_add_pass(&b.boundary);
    CHECK(row_of(&b.boundary, POINT_ATTN_OUT, 1).n == 0);

    boundary_begin_stage(&b.boundary, 1, TOKEN); /* the next stage begins with nothing */
    boundary_piece(&b.boundary, 0, POINT_ATTN_OUT, &(piece){values, 1, 1, 1, 0, NULL, -1, 0});
    CHECK(boundary_end_stage(&b.boundary, true) && b.boundary.found == NULL);
    bench_free(&b);
}

/* ---- sessions -------------------------------------------------------------------------------------------------------------- */

enum { MOST = 8 * POINT_COUNT };

typedef struct table {
    size_t n;
    colibri_watch_row rows[MOST];
} table;

static table table_of(const colibri_session *s)
{
    table t;
    t.n = colibri_session_watch(s, t.rows, MOST);
    CHECK(t.n <= MOST);
    return t;
}

static bool same_tables(const table *a, const table *b)
{
    bool same = a->n == b->n && a->n > 0;
    for (size_t i = 0; same && i < a->n; i++)
        same = a->rows[i].point == b->rows[i].point && a->rows[i].layer == b->rows[i].layer && same_rows(&a->rows[i], &b->rows[i]);
    return same;
}

static colibri_session *watching(colibri_model *m, colibri_watch watch, int threads, int64_t max_tokens)
{
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, threads, max_tokens, .watch = watch});
    CHECK(colibri_session_watches(s) == watch);
    return s;
}

static void test_tables_are_the_same_for_any_threads_and_passes_and_stepped(void)
{
    int32_t ids[N_IDS];
    for (int f = 0; f < N_FAMILIES; f++) {
        tiny_checkpoint t = families[f]();
        colibri_model *m = tiny_open(&t);
        tiny_ids(ids, N_IDS, &t, 5);
        colibri_session *one = watching(m, COLIBRI_WATCH_COUNT, 1, N_IDS), *two = watching(m, COLIBRI_WATCH_COUNT, 2, N_IDS),
                        *walked = watching(m, COLIBRI_WATCH_STOP, 2, N_IDS);
        tiny_feed(one, ids, N_IDS);
        for (int i = 0; i < N_IDS; i++)
            tiny_feed(two, ids + i, 1);
        begin(walked, ids, N_IDS);
        finish(walked);
        table a = table_of(one), b = table_of(two), c = table_of(walked);
        CHECK(same_tables(&a, &b) && same_tables(&a, &c));
        for (size_t i = 0; i < a.n; i++)
            CHECK(a.rows[i].n > 0 && a.rows[i].token == -1);
        colibri_session_release(one);
        colibri_session_release(two);
        colibri_session_release(walked);
        tiny_close(m, &t);
    }
}

static void test_counts_follow_truncation_forks_and_failure(void)
{
    int32_t ids[N_IDS];
    colibri_message message;
    tiny_checkpoint t = tiny_qwen2_moe();
    colibri_model *m = tiny_open(&t);
    tiny_ids(ids, N_IDS, &t, 5);
    colibri_session *s = watching(m, COLIBRI_WATCH_COUNT, 2, N_IDS), *reference = watching(m, COLIBRI_WATCH_COUNT, 1, N_IDS), *fork;
    table empty = table_of(s);
    tiny_feed(reference, ids, 6);
    table six = table_of(reference);
    for (int i = 0; i < 5; i++)
        tiny_feed(s, ids + 2 * i, 2);
    CHECK_OK(colibri_session_truncate(s, 6, &message), message);
    table now = table_of(s);
    CHECK(same_tables(&now, &six));
    CHECK_OK(colibri_session_fork(s, 6, &fork, &message), message);
    now = table_of(fork);
    CHECK(same_tables(&now, &six));
    CHECK(colibri_session_feed(s, &(int32_t){-1}, 1, NULL, NULL, &message) == COLIBRI_ERROR_ARGUMENT);
    begin(s, ids, 2);
    step(s);
    CHECK_OK(colibri_session_abandon(s, &message), message);
    now = table_of(s);
    CHECK(same_tables(&now, &six));
    CHECK_OK(colibri_session_truncate(s, 0, &message), message);
    now = table_of(s);
    CHECK(same_tables(&now, &empty));
    colibri_session_release(s);
    colibri_session_release(fork);
    colibri_session_release(reference);
    tiny_close(m, &t);
}

static void test_the_first_value_of_a_sum_is_that_of_the_passes_it_keeps(void)
{
    int32_t ids[N_IDS];
    colibri_message message;
    tiny_checkpoint t = tiny_mixtral();
    t.plant_tensor = "model.embed_tokens.weight";
    t.plant_value = NAN;
    colibri_model *m = tiny_open(&t);
    tiny_ids(ids, N_IDS, &t, 5);
    for (int i = 0; i < N_IDS; i++)
        ids[i] = i == 5 || i == 8 ? 0 : ids[i] == 0 ? 1 : ids[i]; /* the planted value is of token id 0 */
    colibri_session *s = watching(m, COLIBRI_WATCH_COUNT, 2, N_IDS), *fork;
    for (int i = 0; i < 5; i++)
        tiny_feed(s, ids + 2 * i, 2);
    for (int kept = 10; kept >= 0; kept -= 2) {
        colibri_session *reference = watching(m, COLIBRI_WATCH_COUNT, 1, N_IDS);
        if (kept > 0)
            tiny_feed(reference, ids, kept);
        CHECK_OK(colibri_session_fork(s, kept, &fork, &message), message);
        CHECK_OK(colibri_session_truncate(s, kept, &message), message);
        table a = table_of(reference), b = table_of(s), c = table_of(fork);
        CHECK(same_tables(&a, &b) && same_tables(&a, &c));
        CHECK(a.rows[0].token == (kept > 5 ? 5 : -1) && a.rows[0].n_nan == (kept > 8 ? 2 : kept > 5));
        colibri_session_release(fork);
        colibri_session_release(reference);
    }
    colibri_session_release(s);
    tiny_close(m, &t);
}

/* A session plans one for each token: of 48 layers without a shared expert 63 KB, less than keys and values take. */
static void test_what_is_kept_of_a_pass_is_less_than_half_a_table(void)
{
    config c = {.num_hidden_layers = 48};
    for (int l = 0; l < 48; l++)
        c.is_moe[l] = true;
    CHECK(boundary_pass_bytes(&c) <= 64 << 10 && 2 * boundary_pass_bytes(&c) < boundary_table_bytes(&c));
}

static void test_stop_ends_a_pass_and_a_step_with_a_sentence_and_the_session_goes_on(void)
{
    int32_t ids[N_IDS];
    colibri_message message;
    tiny_checkpoint t = tiny_mixtral();
    t.plant_tensor = "model.layers.1.input_layernorm.weight";
    t.plant_index = 3;
    t.plant_value = NAN;
    colibri_model *m = tiny_open(&t);
    tiny_ids(ids, N_IDS, &t, 5);
    colibri_session *s = watching(m, COLIBRI_WATCH_STOP, 2, N_IDS);
    CHECK(colibri_session_feed(s, ids, 4, NULL, NULL, &message) == COLIBRI_ERROR_NONFINITE);
    CHECK_MESSAGE_HAS(message, "\"layers.1.attn.norm\" is not finite: NaN at token 0, index 3; the session still has its 0 tokens");
    CHECK(colibri_session_length(s) == 0 && !is_open(s));
    begin(s, ids, 2);
    step_to(s, COLIBRI_STAGE_ATTENTION, 1);
    for (int i = 0; i < 2; i++) {
        CHECK(colibri_session_step(s, NULL, NULL, NULL, &message) == COLIBRI_ERROR_NONFINITE);
        CHECK_MESSAGE_HAS(message, "the open pass is still before layer 1, attention");
    }
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_a_session_that_does_not_watch_has_no_table_and_a_wrong_watch_is_refused(void)
{
    colibri_message message;
    tiny_checkpoint t = tiny_olmoe();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = watching(m, COLIBRI_WATCH_OFF, 1, 4);
    CHECK(colibri_session_watch(s, NULL, 0) == 0);
    colibri_session_release(s);
    colibri_session_options o = {.size = sizeof o, .max_tokens = 4, .watch = (colibri_watch)3};
    CHECK(colibri_session_create(m, &o, &s, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "watch 3 does not exist");
    tiny_close(m, &t);
}

int main(void)
{
    RUN(test_counts_do_not_depend_on_how_rows_were_cut);
    RUN(test_the_first_value_is_the_one_of_the_least_token_then_expert_then_index);
    RUN(test_a_stage_that_stops_is_not_counted_and_names_its_first_point);
    RUN(test_tables_are_the_same_for_any_threads_and_passes_and_stepped);
    RUN(test_counts_follow_truncation_forks_and_failure);
    RUN(test_the_first_value_of_a_sum_is_that_of_the_passes_it_keeps);
    RUN(test_what_is_kept_of_a_pass_is_less_than_half_a_table);
    RUN(test_stop_ends_a_pass_and_a_step_with_a_sentence_and_the_session_goes_on);
    RUN(test_a_session_that_does_not_watch_has_no_table_and_a_wrong_watch_is_refused);
    return 0;
}
