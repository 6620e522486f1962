/* test_float32.c: the portable fused multiply-add against the C library's, and widening against what the formats mean. */
#define _DEFAULT_SOURCE
#include "numbers.h"

static void check_fma(float a, float b, float c)
{
    float got = fma_f32_portable(a, b, c), want = fmaf(a, b, c);
    if (!same_number(got, want)) {
        fprintf(stderr, "fma(%a, %a, %a) is %a, not %a\n", (double)a, (double)b, (double)c, (double)got, (double)want);
        exit(1);
    }
}

static void test_the_portable_fma_equals_the_library_on_edges(void)
{
    static const uint32_t parts[] = {
        0x00000000, 0x00000001, 0x00000003, 0x007fffff, 0x00800000, 0x00800001, 0x00ffffff, 0x0c800001,
        0x33800000, 0x34000001, 0x3f7fffff, 0x3f800000, 0x3f800001, 0x40490fdb, 0x4b7fffff, 0x4b800001,
        0x5f7fffff, 0x5f800001, 0x7e800000, 0x7f7ffffe, 0x7f7fffff, 0x7f800000, 0x7fc00000};
    enum { N = 2 * sizeof parts / sizeof parts[0] };
    float edges[N];
    for (int i = 0; i < N; i++)
        edges[i] = float_from_bits(parts[i / 2] | (uint32_t)(i % 2) << 31);
    for (int a = 0; a < N; a++)
        for (int b = 0; b < N; b++)
            for (int c = 0; c < N; c++)
                check_fma(edges[a], edges[b], edges[c]);
}

static void test_the_portable_fma_equals_the_library_on_random_numbers(void)
{
    for (int i = 0; i < 2000000; i++) {
        uint32_t a = random_bits(), b = random_bits(), c = random_bits();
        check_fma(float_from_bits(a), float_from_bits(b), float_from_bits(c));
        /* A sum in which both parts matter: c near the product in size, and with few bits, so that ties come up. */
        float x = ldexpf(random_uniform(), random_below(60) - 30), y = ldexpf(random_uniform(), random_below(60) - 110);
        int exponent = x == 0 || y == 0 ? 0 : ilogbf(x) + ilogbf(y);
        check_fma(x, y, ldexpf((float)(random_below(16) - 8), exponent + random_below(60) - 30));
    }
}

static void test_half_numbers_widen_to_what_their_formats_mean(void)
{
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        int sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, mantissa = bits & 1023;
        float f16 = f16_to_float((uint16_t)bits), bf16 = bf16_to_float((uint16_t)bits);
        if (exponent == 31)
            CHECK(mantissa ? f16 != f16 && (float_bits(f16) & 0x00400000) : f16 == sign * INFINITY);
        else
            CHECK(f16 == sign * ldexp(exponent == 0 ? mantissa : 1024 + mantissa, (exponent == 0 ? 1 : exponent) - 25));
        CHECK(f16 != f16 || (signbit(f16) != 0) == (sign < 0));
        CHECK(bf16 == bf16 ? float_bits(bf16) == bits << 16 : (bits & 0x7fff) > 0x7f80 && (float_bits(bf16) & 0x00400000));
    }
}

int main(void)
{
    RUN(test_the_portable_fma_equals_the_library_on_edges);
    RUN(test_the_portable_fma_equals_the_library_on_random_numbers);
    RUN(test_half_numbers_widen_to_what_their_formats_mean);
    return 0;
}
