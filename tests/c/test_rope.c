/* Rotary frequencies against float32 values that torch 2.13 computed on a CPU with AVX2; nearest would give others. */
#include "check.h"
#include "model/config.h"
#include "utils/half.h"

#include <math.h>

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

/* Bits of `1.0 / (theta ** (torch.arange(0, d, 2, dtype=torch.float) / d))` and, for the scaled types, of transformers 5.24's
 * ROPE_INIT_FUNCTIONS[type](Qwen3MoeConfig(head_dim=d, rope_parameters={...})), under torch 2.13. */
static const struct {
    const char *label;
    rope_config rope;
    int64_t head_dim;
    int index[6];
    uint32_t bits[6];
} expected[] = {
    {"default",
     {.type = ROPE_DEFAULT, .theta = 10000},
     16,
     {0, 1, 2, 4, 6, 7},
     {0x3F800000, 0x3EA1E89B, 0x3DCCCCCD, 0x3C23D70A, 0x3A83126F, 0x39A5CB60}},
    {"default",
     {.type = ROPE_DEFAULT, .theta = 1e+06},
     128,
     {0, 1, 16, 32, 62, 63},
     {0x3F800000, 0x3F4E4BAD, 0x3D0186E3, 0x3A83126F, 0x35CEAF79, 0x35A68E4C}},
    {"default",
     {.type = ROPE_DEFAULT, .theta = 500000},
     64,
     {0, 1, 8, 16, 30, 31},
     {0x3F800000, 0x3F29E1C6, 0x3D1A08C8, 0x3AB95D21, 0x369864A7, 0x364A41B0}},
    {"default",
     {.type = ROPE_DEFAULT, .theta = 5000},
     16,
     {0, 1, 2, 4, 6, 7},
     {0x3F800000, 0x3EB09007, 0x3DF38CB4, 0x3C67B46B, 0x3ADC6F9A, 0x3A1808BE}},
    {"linear",
     {.type = ROPE_LINEAR, .theta = 1e6, .factor = 3.3},
     128,
     {0, 1, 16, 32, 62, 63},
     {0x3E9B26CA, 0x3E7A0E27, 0x3C1D0097, 0x399EE00B, 0x34FA871F, 0x34C9E2C9}},
    {"llama3",
     {.type = ROPE_LLAMA3,
      .theta = 5e5,
      .factor = 8,
      .low_freq_factor = 1,
      .high_freq_factor = 4,
      .original_max_position_embeddings = 8192},
     128,
     {0, 1, 16, 32, 62, 63},
     {0x3F800000, 0x3F508AC1, 0x3D1A08C8, 0x3A0995D2, 0x34CA41B0, 0x34A4C2FF}},
    {"yarn",
     {.type = ROPE_YARN,
      .theta = 5000,
      .factor = 4,
      .beta_fast = 8,
      .beta_slow = 1,
      .truncate = true,
      .original_max_position_embeddings = 512},
     16,
     {0, 1, 2, 4, 6, 7},
     {0x3F800000, 0x3EB09007, 0x3DF38CB4, 0x3BE7B46B, 0x39DC6F9A, 0x391808BE}},
    {"yarn",
     {.type = ROPE_YARN,
      .theta = 150000,
      .factor = 32,
      .beta_fast = 32,
      .beta_slow = 1,
      .truncate = false,
      .original_max_position_embeddings = 4096},
     64,
     {0, 1, 8, 16, 30, 31},
     {0x3F800000, 0x3F306535, 0x3D502194, 0x39EF543C, 0x34EB93EB, 0x34A252D3}},
};

static int64_t ulps_apart(float a, uint32_t bits)
{
    uint32_t own;
    memcpy(&own, &a, sizeof own);
    int64_t difference = (int64_t)own - (int64_t)bits; /* both are positive */
    return difference < 0 ? -difference : difference;
}

/* Blends and quotients of the scaled types may differ by a unit where torch's vector code contracts. */
static void test_J3_every_rope_type_agrees_with_torch_to_its_rounding(void)
{
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        static config c;
        float inv_freq[64];
        c.rope = expected[i].rope;
        c.head_dim = expected[i].head_dim;
        rope_inv_freq(&c, inv_freq);
        for (int j = 0; j < 6; j++)
            CHECK(ulps_apart(inv_freq[expected[i].index[j]], expected[i].bits[j]) <= (c.rope.type == ROPE_DEFAULT ? 0 : 1));
    }
}

static void test_the_attention_factor_of_yarn_has_its_two_forms(void)
{
    CHECK(rope_yarn_attention_factor(1, 0, 0) == 1 && rope_yarn_attention_factor(0.5, 0, 0) == 1);
    CHECK(fabs(rope_yarn_attention_factor(4, 0, 0) - (0.1 * log(4) + 1)) < 1e-15);
    CHECK(fabs(rope_yarn_attention_factor(40, 1, 0.707) - (0.1 * log(40) + 1) / (0.0707 * log(40) + 1)) < 1e-15);
    CHECK(rope_yarn_attention_factor(40, 0.7, 0.7) == 1);
    CHECK(fabs(rope_yarn_attention_factor(40, 1, 0) - (0.1 * log(40) + 1)) < 1e-15); /* one of the two alone does not count */
}

int main(void)
{
    RUN(test_frequencies_are_rounded_as_the_reference_rounds_them);
    RUN(test_the_first_pair_turns_one_radian_per_position);
    RUN(test_J3_every_rope_type_agrees_with_torch_to_its_rounding);
    RUN(test_the_attention_factor_of_yarn_has_its_two_forms);
    return 0;
}
