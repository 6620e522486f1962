/* test_rotary.c: cos and sin of rotary angles against the C library in extended precision, at every size of angle. */
#define _DEFAULT_SOURCE
#include "../../csrc/kernels/kernels.h"
#include "numbers.h"

static double worst;

static void check_angle(float angle)
{
    float cos, sin;
    rotary_row(&cos, &sin, &angle, 1, 1, 1.0f);
    double distance = fmax(ulps(cos, cosl((long double)angle)), ulps(sin, sinl((long double)angle)));
    CHECK(distance <= 1);
    worst = fmax(worst, distance);
}

static void test_cos_and_sin_are_within_one_ulp_of_any_float(void)
{
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 4093) {
        float angle = float_from_bits((uint32_t)bits);
        if (angle - angle == 0)
            check_angle(angle);
    }
    /* next to multiples of pi/2, where the reduction loses most */
    for (int turns = 1; turns < 200000; turns += turns < 2000 ? 1 : 97)
        for (int near = -2; near <= 2; near++)
            check_angle(float_from_bits(float_bits((float)(turns * 1.5707963267948966)) + (uint32_t)near));
    check_angle(16367173 * 0x1p72f); /* the float32 closest to a multiple of pi/2 */
    check_angle(0x1.fffffep127f);
    printf("   the worst error is %.3f ulp\n", worst);
}

static void test_the_angle_is_the_float32_product_of_position_and_frequency(void)
{
    enum { HALF = 64 };
    static const int64_t positions[] = {0, 1, 2, 4095, 30000, 32767, 131071, 1000000, 16777217};
    float inv_freq[HALF], cos[HALF], sin[HALF];
    for (int j = 0; j < HALF; j++)
        inv_freq[j] = (float)pow(10000.0, -2.0 * j / (2 * HALF));
    double largest_gap = 0;
    for (size_t p = 0; p < sizeof positions / sizeof positions[0]; p++) {
        rotary_row(cos, sin, inv_freq, HALF, positions[p], 1.0f);
        for (int j = 0; j < HALF; j++) {
            float angle = (float)positions[p] * inv_freq[j];
            CHECK(ulps(cos[j], cosl((long double)angle)) <= 1 && ulps(sin[j], sinl((long double)angle)) <= 1);
            if (positions[p] == 30000)
                largest_gap = fmax(largest_gap, fabs(cos[j] - (double)cosl((long double)positions[p] * inv_freq[j])));
        }
    }
    CHECK(largest_gap > 1e-4); /* an unrounded angle would be another answer: the test can tell them apart */
}

static void test_position_zero_rotates_nothing_and_the_factor_multiplies(void)
{
    float inv_freq[3] = {1.0f, 0.5f, 0.001f}, cos[3], sin[3], plain_cos[3], plain_sin[3];
    rotary_row(cos, sin, inv_freq, 3, 0, 1.0f);
    for (int j = 0; j < 3; j++)
        CHECK(cos[j] == 1 && sin[j] == 0);
    rotary_row(plain_cos, plain_sin, inv_freq, 3, 777, 1.0f);
    rotary_row(cos, sin, inv_freq, 3, 777, 1.2079441f);
    for (int j = 0; j < 3; j++)
        CHECK(cos[j] == plain_cos[j] * 1.2079441f && sin[j] == plain_sin[j] * 1.2079441f);
}

static void test_an_angle_that_is_no_number_gives_nan(void)
{
    float bad[3] = {INFINITY, -INFINITY, NAN}, cos[3], sin[3];
    rotary_row(cos, sin, bad, 3, 1, 1.0f);
    for (int j = 0; j < 3; j++)
        CHECK(cos[j] != cos[j] && sin[j] != sin[j]);
}

int main(void)
{
    RUN(test_cos_and_sin_are_within_one_ulp_of_any_float);
    RUN(test_the_angle_is_the_float32_product_of_position_and_frequency);
    RUN(test_position_zero_rotates_nothing_and_the_factor_multiplies);
    RUN(test_an_angle_that_is_no_number_gives_nan);
    return 0;
}
