/* test_exp.c: our exp against the C library's in extended precision, and all tables against each other.
 *
 * By default every 4,099th float and all near the limits; with the argument "all" each of the 2^32 (some minutes). */
#define _DEFAULT_SOURCE
#include "kernel_checks.h"

static uint32_t step = 4099;
static double worst;

static void check_one(float x)
{
    float y = exp_f32(x);
    if (x != x) {
        CHECK(y != y);
        return;
    }
    if (x > 90 || x < -105) { /* far beyond the limits: most floats, and no need to ask the library */
        CHECK(float_bits(y) == float_bits(x > 0 ? INFINITY : 0.0f));
        return;
    }
    long double exact = expl((long double)x);
    float rounded = (float)exact;
    if (rounded == 0 || rounded == INFINITY) { /* exactly where the true value rounds to them */
        CHECK(y == rounded);
        return;
    }
    double distance = ulps(y, exact);
    CHECK(distance <= 2);
    CHECK(y > 0 && y < INFINITY);
    if (distance > worst)
        worst = distance;
}

static void test_exp_is_within_two_ulp_and_right_at_its_limits(void)
{
    static const float edges[] = {0.0f,         -0.0f, 0x1.62e42ep6f, -103.972076f, -87.33655f, 0.34657359f,
                                  -0.34657359f, 1.0f,  -1.0f,         INFINITY,     -INFINITY};
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += step)
        check_one(float_from_bits((uint32_t)bits));
    for (size_t e = 0; e < sizeof edges / sizeof edges[0]; e++)
        for (uint32_t near = 0; near < 2000; near++) {
            check_one(float_from_bits(float_bits(edges[e]) + near - 1000));
        }
    printf("   the worst error is %.3f ulp\n", worst);
}

static void test_exp_of_known_values(void)
{
    CHECK(exp_f32(0.0f) == 1 && exp_f32(-0.0f) == 1);
    CHECK(exp_f32(INFINITY) == INFINITY && float_bits(exp_f32(-INFINITY)) == 0);
    CHECK(exp_f32(0x1.62e42ep6f) < INFINITY && exp_f32(0x1.62e430p6f) == INFINITY); /* ln of the largest float32 */
    CHECK(exp_f32(-103.97f) == 0x1p-149f && exp_f32(-103.98f) == 0);                 /* around ln of half the smallest */
    CHECK(exp_f32(-100.0f) > 0 && exp_f32(-100.0f) < 0x1p-126f);                      /* gradual underflow */
    CHECK(exp_f32(float_from_bits(0x7f800001)) != exp_f32(float_from_bits(0x7f800001)));
}

static void test_every_table_has_the_same_exp(void)
{
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t + 1 < n_tables; t++)
        check_exp_of_all(tables[t], step);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "all") == 0)
        step = 1;
    RUN(test_exp_of_known_values);
    RUN(test_exp_is_within_two_ulp_and_right_at_its_limits);
    RUN(test_every_table_has_the_same_exp);
    return 0;
}
