/* Widening by bits, against the value that the format's definition gives, for all 65,536 patterns of each. */
#include "check.h"
#include "utils/half.h"

#include <math.h>
#include <stdbool.h>

static void test_f16_equals_sign_times_fraction_times_power_of_two(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        int exponent = (int)(h >> 10 & 31), fraction = (int)(h & 1023);
        float wide = f16_to_float((uint16_t)h);
        if (exponent == 31) {
            uint32_t payload = fraction == 0 ? 0 : (uint32_t)fraction << 13 | 0x400000; /* NaN becomes quiet */
            CHECK(float_bits(wide) == ((h >> 15) << 31 | 0x7F800000 | payload));
            continue;
        }
        double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
        CHECK(float_bits(wide) == float_bits((float)(h >> 15 ? -magnitude : magnitude)));
    }
}

static void test_bf16_is_the_upper_half_of_float32(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        bool is_nan = (h & 0x7FFF) > 0x7F80;
        CHECK(float_bits(bf16_to_float((uint16_t)h)) == (h << 16 | (is_nan ? 0x400000u : 0)));
    }
}

int main(void)
{
    RUN(test_f16_equals_sign_times_fraction_times_power_of_two);
    RUN(test_bf16_is_the_upper_half_of_float32);
    return 0;
}
