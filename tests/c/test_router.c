/* The router against values worked out by hand: gates by every rule, ties, NaN, many experts. */
#include "core/router.h"

#include <math.h>

#include "check.h"

#define MOST 512

typedef struct routed {
    float scores[MOST], gates[MOST];
    int32_t ids[MOST];
} routed;

static routed route_by(const kernels *k, colibri_gate_mode gates, bool by_logits, const float *logits, int64_t n, int64_t top_k)
{
    routed out;
    router r = {.n_experts = n, .top_k = top_k, .select_by_logits = by_logits, .gates = gates};
    unsigned char *scratch = malloc(router_scratch(n));
    CHECK(scratch != NULL);
    route_scores(k, &r, logits, out.scores);
    route_choose(k, &r, r.top_k, logits, out.scores, out.ids, out.gates, scratch);
    free(scratch);
    return out;
}

static bool near(float a, double b)
{
    return fabs((double)a - b) < 5e-6;
}

static const kernels *const *tables;
static size_t n_tables;

static void test_A1_the_gate_rule_changes_gates_and_never_ids(void)
{
    const float z[8] = {2, 1, .5f, -1, 0, -2, -.5f, .25f};
    const struct {
        colibri_gate_mode mode;
        double first, second;
    } rules[] = {
        {COLIBRI_GATES_SOFTMAX, .48773, .17943},
        {COLIBRI_GATES_SOFTMAX_RENORMALISED, .73106, .26894},
        {COLIBRI_GATES_SOFTMAX_OF_CHOSEN, .73106, .26894},
        {COLIBRI_GATES_RAW_LOGITS, 2, 1},
    };
    for (size_t t = 0; t < n_tables; t++)
        for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
            routed r = route_by(tables[t], rules[i].mode, false, z, 8, 2);
            CHECK(r.ids[0] == 0 && r.ids[1] == 1);
            CHECK(near(r.gates[0], rules[i].first) && near(r.gates[1], rules[i].second));
            CHECK(near(r.scores[0], .48773) && near(r.scores[5], .48773 * exp(-4)));
        }
}

static void test_selection_by_logits_shows_the_logits_as_scores(void)
{
    const float z[4] = {-1, 3, 2, 0};
    routed r = route_by(tables[0], COLIBRI_GATES_SOFTMAX_OF_CHOSEN, true, z, 4, 2);
    CHECK(r.ids[0] == 1 && r.ids[1] == 2 && r.scores[1] == 3 && r.scores[0] == -1);
    CHECK(near(r.gates[0], 1 / (1 + exp(-1))));

    /* asked for softmax gates all the same, they are shares of all four experts */
    r = route_by(tables[0], COLIBRI_GATES_SOFTMAX, true, z, 4, 2);
    CHECK(r.scores[1] == 3 && near(r.gates[0], exp(3) / (exp(-1) + exp(3) + exp(2) + 1)));
}

static void test_A3_ids_are_distinct_and_in_range_whatever_the_scores(void)
{
    float all_nan[8], one_nan[8], tiny[8];
    for (int i = 0; i < 8; i++) {
        all_nan[i] = NAN;
        one_nan[i] = i == 0 ? NAN : (float)i;
        tiny[i] = i % 2 == 0 ? -1e30f : -1;
    }
    const float *rows[] = {all_nan, one_nan, tiny};
    for (size_t t = 0; t < n_tables; t++)
        for (int by_logits = 0; by_logits < 2; by_logits++)
            for (int i = 0; i < 3; i++) {
                routed r = route_by(tables[t], COLIBRI_GATES_SOFTMAX_RENORMALISED, by_logits, rows[i], 8, 2);
                CHECK(r.ids[0] >= 0 && r.ids[0] < 8 && r.ids[1] >= 0 && r.ids[1] < 8 && r.ids[0] != r.ids[1]);
                if (i < 2 && !by_logits) /* one NaN logit makes the whole softmax NaN: all equal, so the lowest ids */
                    CHECK(r.ids[0] == 0 && r.ids[1] == 1 && isnan(r.gates[0]));
                if (i == 1 && by_logits) /* as a score of its own it is smaller than every number */
                    CHECK(r.ids[0] == 7 && r.ids[1] == 6);
                if (i == 2)
                    CHECK(r.ids[0] == 1 && r.ids[1] == 3);
            }
}

static void test_A4_ties_go_to_the_lower_id_and_near_ties_stay_apart(void)
{
    const float zeros[8] = {0};
    float close[8] = {1.0f, 1.003f};
    routed r = route_by(tables[0], COLIBRI_GATES_SOFTMAX, false, zeros, 8, 2);
    CHECK(r.ids[0] == 0 && r.ids[1] == 1 && r.gates[0] == .125f && r.gates[1] == .125f);
    r = route_by(tables[0], COLIBRI_GATES_SOFTMAX, false, close, 8, 1);
    CHECK(r.ids[0] == 1);
}

static void test_K1_any_number_of_experts_with_the_winner_anywhere(void)
{
    const int64_t counts[] = {1, 2, 3, 5, 7, 8, 60, 64, 257, 300, 512};
    float z[MOST];
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int64_t n = counts[i], places[] = {n - 1, n > 256 ? 256 : 0};
        for (int p = 0; p < 2; p++) {
            for (int64_t e = 0; e < n; e++)
                z[e] = -(float)e / 100;
            z[places[p]] = 1;
            routed r = route_by(tables[0], COLIBRI_GATES_SOFTMAX, false, z, n, n < 3 ? n : 3);
            CHECK(r.ids[0] == places[p]);
            if (n > 1)
                CHECK(r.ids[1] == (places[p] == 0 ? 1 : 0));
        }
    }
}

static void test_renormalised_gates_are_divided_by_the_sum_in_slot_order(void)
{
    const float z[5] = {.1f, .7f, -.3f, .2f, .6f};
    routed p = route_by(tables[0], COLIBRI_GATES_SOFTMAX, false, z, 5, 4);
    routed r = route_by(tables[0], COLIBRI_GATES_SOFTMAX_RENORMALISED, false, z, 5, 4);
    float sum = ((p.gates[0] + p.gates[1]) + p.gates[2]) + p.gates[3];
    for (int s = 0; s < 4; s++)
        CHECK(p.gates[s] == p.scores[p.ids[s]] && r.gates[s] == p.gates[s] / sum);
}

int main(void)
{
    n_tables = kernels_available(&tables);
    RUN(test_A1_the_gate_rule_changes_gates_and_never_ids);
    RUN(test_selection_by_logits_shows_the_logits_as_scores);
    RUN(test_A3_ids_are_distinct_and_in_range_whatever_the_scores);
    RUN(test_A4_ties_go_to_the_lower_id_and_near_ties_stay_apart);
    RUN(test_K1_any_number_of_experts_with_the_winner_anywhere);
    RUN(test_renormalised_gates_are_divided_by_the_sum_in_slot_order);
    return 0;
}
