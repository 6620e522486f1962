/* test_census.c: NaN, Inf and subnormals counted by bit pattern, in whatever build this is. */
#define _DEFAULT_SOURCE
#include "../../csrc/kernels/kernels.h"
#include "numbers.h"

static void test_I2_each_kind_of_number_is_counted_by_its_bits(void)
{
    const uint32_t words[] = {0x3f800000, 0x7fc00000, 0x7f800000, 0xff800000, 0x7f800001,
                              0xffc00000, 0x00000001, 0x807fffff, 0x00800000, 0x80000000};
    colibri_census found = census(words, COLIBRI_F32, 10);
    CHECK(found.n_nan == 3 && found.n_inf == 2 && found.n_subnormal == 2 && found.first_nonfinite == 1);

    const uint16_t f16[] = {0x3c00, 0x0001, 0x83ff, 0x7c00, 0xfc00, 0x7c01, 0xfe00, 0x7bff, 0x0400};
    found = census(f16, COLIBRI_F16, 9);
    CHECK(found.n_nan == 2 && found.n_inf == 2 && found.n_subnormal == 2 && found.first_nonfinite == 3);

    const uint16_t bf16[] = {0x3f80, 0x0001, 0x807f, 0x0080, 0x7f7f, 0xff80, 0x7f81, 0x7fc0};
    found = census(bf16, COLIBRI_BF16, 8);
    CHECK(found.n_nan == 2 && found.n_inf == 1 && found.n_subnormal == 2 && found.first_nonfinite == 5);
}

static void test_an_array_without_them_has_no_first_one(void)
{
    const float zeros[3] = {0, -0.0f, 1};
    colibri_census found = census(zeros, COLIBRI_F32, 3), empty = census(zeros, COLIBRI_F32, 0);
    CHECK(found.n_nan + found.n_inf + found.n_subnormal == 0 && found.first_nonfinite == -1);
    CHECK(empty.n_nan + empty.n_inf + empty.n_subnormal == 0 && empty.first_nonfinite == -1);
}

static void test_large_misaligned_arrays_are_counted_whole(void)
{
    for (int dtype = COLIBRI_F32; dtype <= COLIBRI_BF16; dtype++) {
        const int64_t n = 100003, size = dtype == COLIBRI_F32 ? 4 : 2;
        guarded memory = guarded_new((size_t)(n * size), (size_t)random_below(4));
        colibri_census want = {0, 0, 0, -1};
        for (int64_t i = 0; i < n; i++) {
            float value = random_below(5000) == 0 ? NAN : random_below(5000) == 0 ? -INFINITY : 1.5f;
            put_as(memory.data + i * size, (colibri_dtype)dtype, value);
            want.n_nan += value != value;
            want.n_inf += value == -INFINITY;
            if (want.first_nonfinite < 0 && value != 1.5f)
                want.first_nonfinite = i;
        }
        colibri_census found = census(memory.data, (colibri_dtype)dtype, n);
        CHECK(found.n_nan == want.n_nan && found.n_inf == want.n_inf && found.n_subnormal == 0);
        CHECK(found.first_nonfinite == want.first_nonfinite);
        guarded_free(memory);
    }
}

int main(void)
{
    RUN(test_I2_each_kind_of_number_is_counted_by_its_bits);
    RUN(test_an_array_without_them_has_no_first_one);
    RUN(test_large_misaligned_arrays_are_counted_whole);
    return 0;
}
