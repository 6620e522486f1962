/* The simulators of caches, under the sanitizers: small tables by hand, and what must hold on random requests. */
#include <colibri_cachelab.h>

#include "check.h"

enum { LAYERS = 3, EXPERTS = 9, K = 3, AHEAD = 2, TOKENS = 400, KEYS = LAYERS * EXPERTS };

static int32_t ids[LAYERS * TOKENS * K], next[LAYERS * TOKENS * K], ahead[LAYERS * TOKENS * AHEAD], first[KEYS];
static uint8_t late[LAYERS * TOKENS * AHEAD];
static int64_t passes[TOKENS + 1], sizes[KEYS], uses[KEYS];

static uint32_t draw(uint32_t below)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
}

/* Requests with gaps and repetitions in a set, passes of one to seven tokens, plans half of which are late. */
static cachelab_piece random_piece(bool alone)
{
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        ids[i] = (int32_t)draw(EXPERTS + 1) - 1;
    for (size_t i = 0; i < sizeof ahead / sizeof *ahead; i++) {
        ahead[i] = (int32_t)draw(EXPERTS + 1) - 1;
        late[i] = (uint8_t)draw(2);
    }
    passes[0] = 0;
    for (int64_t token = 1; token <= TOKENS; token++)
        passes[token] = passes[token - 1] + (alone || token == TOKENS || draw(3) == 0);
    for (int32_t key = 0; key < KEYS; key++) {
        sizes[key] = 1 + draw(5);
        uses[key] = draw(10);
    }
    int32_t following[EXPERTS];
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t expert = 0; expert < EXPERTS; expert++)
            first[layer * EXPERTS + expert] = following[expert] = CACHELAB_NEVER;
        cachelab_next_uses(ids + layer * TOKENS * K, passes, TOKENS, K, first + layer * EXPERTS, following, next + layer * TOKENS * K);
    }
    return (cachelab_piece){TOKENS, 0, passes, ids, next, NULL, NULL};
}

static cachelab_setup setup_of(int policy)
{
    return (cachelab_setup){(cachelab_policy)policy, LAYERS, EXPERTS, K, AHEAD, NULL, NULL, uses, first};
}

static void test_L2_eight_requests_in_three_places(void)
{
    int32_t asked[] = {0, 1, 2, 0, 1, 2, 3, 0};
    int64_t pass[] = {0, 1, 2, 3, 4, 5, 6, 7, 8}, counts[2][CACHELAB_N_COUNTS];
    cachelab_piece piece = {8, 0, pass, asked, NULL, NULL, NULL};
    cachelab_setup setup = {CACHELAB_LRU, 1, 4, 1, 0, NULL, NULL, NULL, NULL};
    cachelab_event events[12];
    cachelab_sim *sim = cachelab_sim_new(&setup, 3, 3);
    CHECK(sim && cachelab_sim_feed(sim, &piece, 0, events) == 8);
    cachelab_sim_counts(sim, &counts[0][0]);
    CHECK(counts[1][CACHELAB_POLICY_HITS] == 3 && counts[1][CACHELAB_MISSES] == 5 && counts[0][CACHELAB_REQUESTS] == 0);
    CHECK(events[6].evicted == 0 && events[7].evicted == 1 && events[5].outcome == CACHELAB_HIT);
    cachelab_sim_resize(sim, 2, 2);
    CHECK(cachelab_sim_used(sim) == 2 && cachelab_sim_holds(sim, 3) && cachelab_sim_holds(sim, 0) && !cachelab_sim_holds(sim, 2));
    cachelab_sim_feed(sim, &piece, -1, NULL);
    CHECK(cachelab_sim_used(sim) == 2);
    cachelab_sim_free(sim);

    const int64_t by_hand[5] = {0, 0, 3, 1, 4};
    int64_t distances[5] = {0}, by_stack[5] = {0};
    cachelab_recency *recency = cachelab_recency_new(1, 4, 1);
    cachelab_stack *stack = cachelab_stack_new(&setup);
    CHECK(recency && stack);
    cachelab_recency_feed(recency, asked, 8, NULL, distances);
    cachelab_stack_feed(stack, &piece, by_stack);
    for (int i = 0; i < 5; i++)
        CHECK(distances[i] == by_stack[i] && distances[i] == by_hand[i]);
    cachelab_recency_free(recency);
    cachelab_stack_free(stack);
}

static void test_a_stack_counts_the_hits_of_a_cache_of_every_size(void)
{
    for (int round = 0; round < 4; round++) {
        cachelab_piece piece = random_piece(round % 2);
        for (int policy = 0; policy < CACHELAB_N_POLICIES; policy++) {
            cachelab_setup setup = setup_of(policy);
            cachelab_stack *stack = cachelab_stack_new(&setup);
            int64_t depths[KEYS + 1] = {0}, hits = 0;
            if (!stack)
                continue;
            cachelab_stack_feed(stack, &piece, depths);
            for (int64_t limit = 0; limit <= KEYS; limit++) {
                int64_t counts[LAYERS][2][CACHELAB_N_COUNTS], found = 0;
                cachelab_sim *sim = cachelab_sim_new(&setup, limit, limit);
                CHECK(sim);
                cachelab_sim_feed(sim, &piece, -1, NULL);
                cachelab_sim_counts(sim, &counts[0][0][0]);
                for (int row = 0; row < 2 * LAYERS; row++)
                    found += counts[row / 2][row % 2][CACHELAB_POLICY_HITS];
                CHECK(found == hits);
                hits += depths[limit];
                cachelab_sim_free(sim);
            }
            cachelab_stack_free(stack);
        }
    }
}

static void test_counters_add_up_and_the_limit_holds(void)
{
    static cachelab_event events[EXPERTS + TOKENS * K];
    for (int round = 0; round < 44; round++) {
        cachelab_piece piece = random_piece(round % 2);
        cachelab_setup setup = setup_of(round % CACHELAB_N_POLICIES);
        int64_t limit = 1 + draw(3 * KEYS), counts[LAYERS * 2][CACHELAB_N_COUNTS], requests = 0;
        piece.ahead = ahead;
        piece.late = round % 3 ? late : NULL;
        setup.sizes = setup.bytes = sizes;
        cachelab_sim *sim = cachelab_sim_new(&setup, limit, limit / 3);
        CHECK(sim);
        cachelab_sim_place(sim, (int32_t)draw(KEYS), true);
        cachelab_sim_place(sim, (int32_t)draw(KEYS), false);
        for (int again = 0; again < 3; again++) {
            int64_t n = cachelab_sim_feed(sim, &piece, 1, events);
            CHECK(n <= EXPERTS + TOKENS * K && cachelab_sim_used(sim) <= limit);
            for (int64_t i = 0; i < n; i++)
                CHECK(events[i].key / EXPERTS == 1 && events[i].evicted >= -1 && events[i].evicted < KEYS);
            limit = cachelab_sim_pinned(sim) + draw(3 * KEYS);
            cachelab_sim_resize(sim, limit, limit / 3);
            CHECK(cachelab_sim_used(sim) <= limit);
        }
        cachelab_sim_counts(sim, &counts[0][0]);
        for (int row = 0; row < 2 * LAYERS; row++) {
            int64_t *c = counts[row], sum = 0;
            for (int what = CACHELAB_PIN_HITS; what <= CACHELAB_MISSES; what++)
                sum += c[what];
            CHECK(sum == c[CACHELAB_REQUESTS] && c[CACHELAB_WASTED] <= c[CACHELAB_PREFETCHED]);
            requests += sum;
        }
        CHECK(requests > 0);
        cachelab_sim_free(sim);
    }
}

/* Long enough that the line of time is full many times, against keys looked for one by one. */
static void test_a_distance_is_the_number_of_other_keys_since(void)
{
    cachelab_piece piece = random_piece(true);
    static int32_t depths[LAYERS * TOKENS * K];
    int64_t last[KEYS], clock = 0;
    cachelab_recency *recency = cachelab_recency_new(LAYERS, EXPERTS, K);
    CHECK(recency);
    for (int32_t key = 0; key < KEYS; key++)
        last[key] = -1;
    cachelab_recency_feed(recency, piece.ids, TOKENS, depths, NULL);
    for (int64_t token = 0; token < TOKENS; token++)
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            int64_t begin = clock, before[KEYS];
            memcpy(before, last, sizeof before);
            for (int32_t slot = 0; slot < K; slot++) {
                int64_t at = (layer * TOKENS + token) * K + slot, key = layer * EXPERTS + ids[at], expected = 0;
                if (ids[at] < 0 || last[key] >= begin) {
                    CHECK(depths[at] == -2);
                    continue;
                }
                for (int32_t other = 0; other < KEYS; other++)
                    expected += before[other] > before[key];
                CHECK(depths[at] == (before[key] < 0 ? -1 : expected));
                last[key] = clock++;
            }
        }
    cachelab_recency_free(recency);
}

int main(void)
{
    RUN(test_L2_eight_requests_in_three_places);
    RUN(test_a_stack_counts_the_hits_of_a_cache_of_every_size);
    RUN(test_counters_add_up_and_the_limit_holds);
    RUN(test_a_distance_is_the_number_of_other_keys_since);
    return 0;
}
