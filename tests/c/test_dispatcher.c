/* The dispatcher: every choice gets one row, experts in order, tokens ascending; and the way back through the aggregator. */
#include "core/dispatcher.h"

#include <math.h>

#include "check.h"
#include "core/aggregator.h"
#include "support/tiny_checkpoint.h"

#define MOST_TOKENS 64
#define MOST_K 4
#define MOST_EXPERTS 16
#define WIDTH 5

typedef struct plan_of {
    int32_t tokens[MOST_TOKENS * MOST_K];
    int64_t offsets[MOST_EXPERTS + 1], places[MOST_TOKENS * MOST_K];
} plan_of;

static void check_invariants(const int32_t *ids, int64_t n, int64_t k, int64_t n_experts, int64_t first_token, int64_t first_row)
{
    plan_of p;
    dispatch d = {p.tokens, p.offsets, p.places};
    dispatch_plan(&d, ids, n, k, n_experts, first_token, first_row);

    CHECK(p.offsets[0] == first_row && p.offsets[n_experts] == first_row + n * k);
    for (int64_t e = 0; e < n_experts; e++) {
        int64_t first = p.offsets[e] - first_row, stop = p.offsets[e + 1] - first_row, count = 0;
        for (int64_t i = 0; i < n * k; i++)
            count += ids[i] == e;
        CHECK(stop - first == count);
        for (int64_t r = first; r < stop; r++)
            CHECK(r == first || p.tokens[r - 1] < p.tokens[r]);
    }
    for (int64_t i = 0; i < n * k; i++) {
        CHECK(p.tokens[p.places[i]] == first_token + i / k);
        CHECK(p.places[i] >= p.offsets[ids[i]] - first_row && p.places[i] < p.offsets[ids[i] + 1] - first_row);
    }
}

static void test_K2_one_token_of_two_choices_leaves_six_experts_empty(void)
{
    const int32_t ids[2] = {6, 2};
    check_invariants(ids, 1, 2, 8, 0, 0);
    check_invariants(ids, 1, 2, 8, 100, 200);
}

static void test_K2_no_token_gives_no_row(void)
{
    check_invariants(NULL, 0, 2, 8, 7, 14);
}

static void test_K2_all_tokens_may_go_to_the_last_expert(void)
{
    int32_t ids[64];
    for (int i = 0; i < 64; i++)
        ids[i] = 7;
    check_invariants(ids, 64, 1, 8, 0, 0);
}

static void test_K2_random_choices_are_all_placed_once(void)
{
    uint64_t state = 7;
    int32_t ids[MOST_TOKENS * MOST_K];
    for (int round = 0; round < 200; round++) {
        int64_t n = 1 + tiny_random(&state) % MOST_TOKENS, n_experts = MOST_K + tiny_random(&state) % (MOST_EXPERTS - MOST_K);
        for (int64_t t = 0; t < n; t++) {
            int32_t first = (int32_t)(tiny_random(&state) % (uint32_t)n_experts);
            for (int32_t s = 0; s < MOST_K; s++)
                ids[t * MOST_K + s] = (first + s) % (int32_t)n_experts; /* distinct within a token */
        }
        check_invariants(ids, n, MOST_K, n_experts, round, round * MOST_K);
    }
}

static void test_an_id_that_is_none_leaves_an_unused_row_at_the_end_and_writes_nowhere_else(void)
{
    enum { n = 3, k = 2, n_rows = 3, guard = 77 };
    const int32_t ids[n * k] = {2, -1, INT32_MAX, 1, INT32_MIN, 0};
    const int32_t expected_tokens[n * k] = {12, 11, 10, -1, -1, -1};
    const int64_t expected_places[n * k] = {2, -1, -1, 1, -1, 0};
    int32_t tokens[n * k + 1];
    int64_t offsets[5], places[n * k + 1];
    tokens[n * k] = guard;
    offsets[4] = places[n * k] = guard;
    CHECK(dispatch_plan(&(dispatch){tokens, offsets, places}, ids, n, k, 3, 10, 20) == n_rows);
    CHECK(memcmp(tokens, expected_tokens, sizeof expected_tokens) == 0);
    CHECK(memcmp(places, expected_places, sizeof expected_places) == 0);
    CHECK(offsets[0] == 20 && offsets[1] == 21 && offsets[2] == 22 && offsets[3] == 23);
    CHECK(tokens[n * k] == guard && offsets[4] == guard && places[n * k] == guard);

    const float packed[n_rows] = {8, 4, 2}, gates[n * k] = {1, NAN, NAN, .5f, NAN, .25f};
    float out[n];
    machine m;
    colibri_message message;
    CHECK_OK(machine_init(&m, 1, &message), message);
    aggregate_routed(&m, out, packed, gates, places, n, k, 1);
    CHECK(out[0] == 2 && out[1] == 2 && out[2] == 2); /* a gate of no expert is not even looked at */
    machine_free(&m);
}

static void test_gathered_rows_come_back_to_their_tokens_weighted_by_their_gates(void)
{
    enum { n = 3, k = 2, first_token = 10 };
    const int32_t ids[n * k] = {2, 0, 0, 1, 2, 1};
    const float gates[n * k] = {.5f, .25f, 1, 2, .125f, 4};
    float x[n * WIDTH], packed[n * k * WIDTH], out[n * WIDTH];
    plan_of p;
    dispatch d = {p.tokens, p.offsets, p.places};
    machine m;
    colibri_message message;
    CHECK_OK(machine_init(&m, 2, &message), message);
    m.serial_below = 0;
    for (int i = 0; i < n * WIDTH; i++)
        x[i] = (float)(i + 1);

    dispatch_plan(&d, ids, n, k, 3, first_token, 0);
    dispatch_gather(&m, packed, x, p.tokens, first_token, n * k, WIDTH);
    for (int r = 0; r < n * k; r++)
        CHECK(memcmp(packed + r * WIDTH, x + (p.tokens[r] - first_token) * WIDTH, sizeof(float) * WIDTH) == 0);

    aggregate_routed(&m, out, packed, gates, p.places, n, k, WIDTH);
    for (int t = 0; t < n; t++)
        for (int c = 0; c < WIDTH; c++)
            CHECK(out[t * WIDTH + c] == (gates[t * k] + gates[t * k + 1]) * x[t * WIDTH + c]); /* exact: small powers of two */
    machine_free(&m);
}

int main(void)
{
    RUN(test_K2_one_token_of_two_choices_leaves_six_experts_empty);
    RUN(test_K2_no_token_gives_no_row);
    RUN(test_K2_all_tokens_may_go_to_the_last_expert);
    RUN(test_K2_random_choices_are_all_placed_once);
    RUN(test_an_id_that_is_none_leaves_an_unused_row_at_the_end_and_writes_nowhere_else);
    RUN(test_gathered_rows_come_back_to_their_tokens_weighted_by_their_gates);
    return 0;
}
