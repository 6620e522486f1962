/* Rotary frequencies against float32 values that torch 2.13 computed on a CPU with AVX2; nearest would give others. */
#include "check.h"
#include "model/config.h"
#include "utils/half.h"

static const struct {
    double theta;
    int64_t head_dim, pair;
    float expected;
} recorded[] = {
    /* whole blocks of 16 pairs: torch's power is one unit off */
    {10000, 50, 1, 0x1.6237acp-1f},     /* 0x1.6237aap-1 by the nearest power */
    {1000000, 128, 37, 0x1.6453f6p-12f}, /* 0x1.6453f4p-12 */
    {150000, 64, 6, 0x1.b65f3ep-4f},    /* 0x1.b65f3cp-4 */
    {5000000, 128, 19, 0x1.504622p-7f}, /* 0x1.504620p-7 */
    {5000, 64, 15, 0x1.2e5cc4p-6f},     /* 0x1.2e5cc6p-6 */
    {10000, 128, 1, 0x1.bb5faep-1f},    /* the same */
    /* a rest shorter than a block: nearest is right */
    {2420.211181640625, 16, 6, 0x1.7bdb5cp-9f},
    {159.04258728027344, 16, 6, 0x1.6dd5acp-6f},
};

static void test_frequencies_are_rounded_as_the_reference_rounds_them(void)
{
    for (size_t i = 0; i < sizeof recorded / sizeof *recorded; i++) {
        config c = {.head_dim = recorded[i].head_dim, .rope = {.type = ROPE_DEFAULT, .theta = recorded[i].theta}};
        float inv_freq[64];
        rope_inv_freq(&c, inv_freq);
        CHECK(float_bits(inv_freq[recorded[i].pair]) == float_bits(recorded[i].expected));
    }
}

static void test_the_first_pair_turns_one_radian_per_position(void)
{
    static const int64_t head_dims[] = {2, 16, 50, 64, 128};
    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++) {
        config c = {.head_dim = head_dims[i], .rope = {.type = ROPE_DEFAULT, .theta = 1e6}};
        float inv_freq[64];
        rope_inv_freq(&c, inv_freq);
        CHECK(inv_freq[0] == 1.0f);
        for (int64_t j = 1; j < head_dims[i] / 2; j++)
            CHECK(inv_freq[j] < inv_freq[j - 1] && inv_freq[j] > 1e-6f);
    }
}

int main(void)
{
    RUN(test_frequencies_are_rounded_as_the_reference_rounds_them);
    RUN(test_the_first_pair_turns_one_radian_per_position);
    return 0;
}
