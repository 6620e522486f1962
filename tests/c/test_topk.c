/* test_topk.c: the selection network against a scan that tries every expert for every place. */
#define _DEFAULT_SOURCE
#include "../../csrc/kernels/kernels.h"
#include "numbers.h"

enum { MOST = COLIBRI_MAX_EXPERTS };

/* a before b: greater, any number before NaN, else the lower index. */
static bool before(const float *scores, int a, int b)
{
    bool nan_a = scores[a] != scores[a], nan_b = scores[b] != scores[b];
    if (nan_a != nan_b)
        return nan_b;
    if (!nan_a && scores[a] != scores[b])
        return scores[a] > scores[b];
    return a < b;
}

static void brute_force(int32_t *ids, const float *scores, int n, int k)
{
    bool taken[MOST] = {false};
    for (int place = 0; place < k; place++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || before(scores, e, best)))
                best = e;
        taken[best] = true;
        ids[place] = best;
    }
}

static void check(const float *scores, int n, int k)
{
    static uint64_t scratch[MOST + 1];
    int32_t got[MOST], want[MOST];
    CHECK(topk_scratch(n) <= MOST * sizeof(uint64_t));
    const uint64_t canary = 0x0123456789abcdef;
    scratch[topk_scratch(n) / sizeof(uint64_t)] = canary;
    topk(got, scores, n, k, scratch);
    CHECK(scratch[topk_scratch(n) / sizeof(uint64_t)] == canary);
    brute_force(want, scores, n, k);
    for (int i = 0; i < k; i++)
        CHECK(got[i] == want[i]);
}

static const int sizes[] = {1, 2, 3, 5, 7, 8, 60, 64, 257, 300, 512, 1024};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };

static void test_K1_any_number_of_experts_and_any_k(void)
{
    static float scores[MOST];
    for (int s = 0; s < N_SIZES; s++)
        for (int mood = 0; mood < N_MOODS; mood++)
            for (int trial = 0; trial < 8; trial++) {
                int n = sizes[s], k = trial == 0 ? 1 : trial == 1 ? n : trial == 2 ? (n < 8 ? n : 8) : 1 + random_below(n);
                for (int e = 0; e < n; e++)
                    scores[e] = random_float((enum mood)mood);
                check(scores, n, k);
            }
}

static void test_K1_winners_in_the_last_slot_and_at_256(void)
{
    static float scores[MOST];
    for (int s = 0; s < N_SIZES; s++)
        for (int k = 1; k <= 8 && k <= sizes[s]; k++) {
            int n = sizes[s];
            for (int e = 0; e < n; e++)
                scores[e] = -1 - (float)(e % 7);
            scores[n - 1] = 3;
            if (n > 256)
                scores[256] = 4;
            check(scores, n, k);
        }
}

static void test_A3_nan_scores_give_distinct_ids_in_range(void)
{
    float all_nan[8], one_nan[8] = {NAN, 1, 5, 2, 4, 3, 0, -1};
    float low[8] = {-2e30f, -3e30f, -1e38f, -INFINITY, -2e30f, -5e37f, -1e31f, -INFINITY};
    for (int e = 0; e < 8; e++)
        all_nan[e] = float_from_bits(0x7fc00000 ^ (uint32_t)(e % 2) << 31 ^ (uint32_t)e);
    for (int k = 1; k <= 8; k++) {
        check(all_nan, 8, k);
        check(one_nan, 8, k);
        check(low, 8, k);
    }
    int32_t ids[2];
    uint64_t scratch[8];
    topk(ids, all_nan, 8, 2, scratch);
    CHECK(ids[0] == 0 && ids[1] == 1);
    topk(ids, one_nan, 8, 2, scratch);
    CHECK(ids[0] == 2 && ids[1] == 4);
    topk(ids, low, 8, 2, scratch);
    CHECK(ids[0] == 0 && ids[1] == 4);
}

static void test_A4_ties_go_to_the_lower_index(void)
{
    float zeros[8] = {0}, signs[5] = {-0.0f, 0.0f, -1, 0.0f, -0.0f}, close[4] = {1.0f, 1.003f, 0, 0};
    int32_t ids[5];
    uint64_t scratch[8];
    topk(ids, zeros, 8, 2, scratch);
    CHECK(ids[0] == 0 && ids[1] == 1);
    topk(ids, signs, 5, 5, scratch); /* -0 equals +0 */
    CHECK(ids[0] == 0 && ids[1] == 1 && ids[2] == 3 && ids[3] == 4 && ids[4] == 2);
    topk(ids, close, 4, 1, scratch); /* equal in bf16, not in float32 */
    CHECK(ids[0] == 1);
    static float many[MOST]; /* long runs of equals */
    for (int s = 0; s < N_SIZES; s++)
        for (int k = 1; k <= sizes[s]; k += 1 + sizes[s] / 9) {
            for (int e = 0; e < sizes[s]; e++)
                many[e] = (float)random_below(3);
            check(many, sizes[s], k);
        }
}

int main(void)
{
    RUN(test_K1_any_number_of_experts_and_any_k);
    RUN(test_K1_winners_in_the_last_slot_and_at_256);
    RUN(test_A3_nan_scores_give_distinct_ids_in_range);
    RUN(test_A4_ties_go_to_the_lower_index);
    return 0;
}
