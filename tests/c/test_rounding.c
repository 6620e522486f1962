/* test_rounding.c: rounding to narrow formats against a search in the list of all numbers that the format has.
 *
 * By default 18 floats of each upper half, every number of the formats and every halfway point; with the argument "all" each of the
 * 2^32 floats (half an hour). */
#define _DEFAULT_SOURCE
#include <fenv.h>

#include "../../csrc/kernels/rounding.h"
#include "kernel_checks.h"

/* What a format is, written down here once more: its numbers from 0 on, and what would follow if the exponent went on. */
typedef struct list {
    colibri_format format;
    int exponent_bits, fraction_bits, n; /* numbers[0] = 0 .. numbers[n - 1]: the largest */
    bool has_inf;
    int last; /* where the last search ended: the next value is mostly near */
    double numbers[1 << 15];
} list;

static list lists[] = {{COLIBRI_FLOAT16, 5, 10, 0, true, 0, {0}},
                       {COLIBRI_BFLOAT16, 8, 7, 0, true, 0, {0}},
                       {COLIBRI_FLOAT8_E4M3FN, 4, 3, 0, false, 0, {0}},
                       {COLIBRI_FLOAT8_E5M2, 5, 2, 0, true, 0, {0}}};
enum { N_LISTS = sizeof lists / sizeof *lists };

static double number(const list *f, int code)
{
    int exponent = code >> f->fraction_bits, fraction = code & ((1 << f->fraction_bits) - 1), bias = (1 << (f->exponent_bits - 1)) - 1;
    if (exponent > 0)
        fraction |= 1 << f->fraction_bits;
    return ldexp(fraction, (exponent > 0 ? exponent : 1) - bias - f->fraction_bits);
}

static void fill(list *f)
{
    int codes = 1 << (f->exponent_bits + f->fraction_bits);
    f->n = f->has_inf ? codes - (1 << f->fraction_bits) : codes - 1; /* the last exponent means Inf and NaN, or the last code NaN */
    for (int code = 0; code < f->n; code++)
        f->numbers[code] = number(f, code);
}

/* The nearest number by search; ties to the even code. */
static float expected(list *f, float x, bool flush, bool saturate)
{
    double size = fabs((double)x), largest = f->numbers[f->n - 1], next = number(f, f->n);
    int low = 0, high = f->n, near = f->last;
    if (x != x)
        return NAN;
    if (f->numbers[near] <= size && (near + 1 == f->n || size < f->numbers[near + 1])) {
        low = near;
        high = near + 1;
    }
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (f->numbers[middle] <= size)
            low = middle;
        else
            high = middle;
    }
    f->last = low;
    double above = low + 1 < f->n ? f->numbers[low + 1] : next, up = above - size, down = size - f->numbers[low];
    int code = up < down || (up == down && low % 2 == 1) ? low + 1 : low;
    double y = size > next || code == f->n ? (saturate ? largest : f->has_inf ? INFINITY : NAN) : f->numbers[code];
    if (flush && code >> f->fraction_bits == 0)
        y = 0;
    return (float)copysign(y, (double)x);
}

static void check_one(list *f, uint32_t bits)
{
    for (int flags = 0; flags < 4; flags++) {
        float x = float_from_bits(bits), y = x, want = expected(f, x, flags & 1, flags & 2);
        round_to(&y, 1, (colibri_rounding){f->format, flags & 1, flags & 2});
        CHECK(want != want ? y != y : float_bits(y) == float_bits(want));
    }
}

static void check_both_signs_near(list *f, double value)
{
    uint32_t bits = float_bits((float)value);
    for (uint32_t minus = 0, sign = 0; minus < 2; minus++, sign = 0x80000000u) {
        check_one(f, sign | bits);
        check_one(f, sign | (bits + 1));
        check_one(f, sign | (bits > 0 ? bits - 1 : 0));
    }
}

static bool all;

static void test_every_value_goes_to_the_nearest_number_of_the_format(void)
{
    static const uint32_t lower[] = {0,      1,      2,      0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000,
                                     0x3fff, 0x4000, 0x6000, 0x7fff, 0x8000, 0x8001, 0xc000, 0xfffe, 0xffff};
    for (list *f = lists; f < lists + N_LISTS; f++) {
        for (uint32_t upper = 0; upper < 0x10000; upper++)
            for (size_t i = 0; i < sizeof lower / sizeof *lower; i++)
                check_one(f, upper << 16 | lower[i]);
        for (uint64_t bits = 0; all && bits < (uint64_t)1 << 32; bits++)
            check_one(f, (uint32_t)bits);
    }
}

static void test_numbers_of_the_format_stay_and_halfway_points_go_to_the_even_one(void)
{
    for (list *f = lists; f < lists + N_LISTS; f++)
        for (int code = 0; code < f->n; code++) {
            float y = (float)f->numbers[code];
            round_to(&y, 1, (colibri_rounding){f->format, false, false});
            CHECK(y == (float)f->numbers[code]);
            check_both_signs_near(f, f->numbers[code]);
            check_both_signs_near(f, (f->numbers[code] + number(f, code + 1)) / 2);
        }
}

static float one(float x, colibri_rounding how)
{
    round_to(&x, 1, how);
    return x;
}

static void test_float32_is_left_alone_but_for_the_flags(void)
{
    const float values[] = {0, -0.0f, 1.1f, 0x1p-149f, -0x1.fffffcp-127f, 0x1p-126f, FLT_MAX, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        float x = values[i];
        CHECK(float_bits(one(x, (colibri_rounding){COLIBRI_FLOAT32, false, false})) == float_bits(x));
        float flushed = fabsf(x) < FLT_MIN ? copysignf(0, x) : x, limited = fabsf(x) > FLT_MAX ? copysignf(FLT_MAX, x) : x;
        CHECK(float_bits(one(x, (colibri_rounding){COLIBRI_FLOAT32, true, false})) == float_bits(flushed));
        CHECK(float_bits(one(x, (colibri_rounding){COLIBRI_FLOAT32, false, true})) == float_bits(limited));
    }
    float nan = one(float_from_bits(0x7f800001), (colibri_rounding){COLIBRI_FLOAT32, true, true});
    CHECK(nan != nan);
}

static void test_overflow_begins_where_rounding_passes_the_largest_number(void)
{
    const colibri_rounding f16 = {COLIBRI_FLOAT16, false, false}, e4m3 = {COLIBRI_FLOAT8_E4M3FN, false, false},
                           e5m2 = {COLIBRI_FLOAT8_E5M2, false, false};
    CHECK(one(65519.996f, f16) == 65504 && one(65520, f16) == INFINITY && one(-65520, f16) == -INFINITY);
    CHECK(one(464, e4m3) == 448 && one(464.00003f, e4m3) != one(464.00003f, e4m3));
    CHECK(one(61439.996f, e5m2) == 57344 && one(61440, e5m2) == INFINITY);
    CHECK(one(-INFINITY, (colibri_rounding){COLIBRI_FLOAT8_E4M3FN, false, true}) == -448);
}

static void test_I1_the_rounding_mode_of_the_process_has_no_say(void)
{
    for (int i = 0; i < 100000; i++) {
        uint32_t bits = random_bits();
        for (list *f = lists; f < lists + N_LISTS; f++) {
            colibri_rounding how = {f->format, i & 1, i & 2};
            float plain = one(float_from_bits(bits), how);
            CHECK(fesetround(FE_UPWARD) == 0);
            float upward = one(float_from_bits(bits), how);
            CHECK(fesetround(FE_TONEAREST) == 0);
            CHECK(plain != plain ? upward != upward : float_bits(plain) == float_bits(upward));
        }
    }
}

/* One value at a time, as the header of kernels says it, with a rounding after each operation. */
static float slow_dot(const float *a, const float *b, int n, colibri_rounding how)
{
    float lanes[16] = {0};
    for (int i = 0; i < n; i++)
        lanes[i % 16] = one(fmaf(a[i], b[i], lanes[i % 16]), how);
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lanes[j] = one(lanes[j] + lanes[j + half], how);
    return lanes[0];
}

static bool same(float a, float b)
{
    return float_bits(a) == float_bits(b) || (a != a && b != b);
}

static void test_partial_sums_are_rounded_one_by_one(void)
{
    enum { N = 37, ROWS = 3 };
    for (int round = 0; round < 200; round++)
        for (colibri_format format = COLIBRI_FLOAT32; format <= COLIBRI_FLOAT8_E5M2; format++) {
            colibri_rounding how = {format, false, false};
            float x[N], w[ROWS * N], b[ROWS], out[ROWS], scores[ROWS], sum[N];
            for (int i = 0; i < N; i++)
                x[i] = random_float(round % 2 ? SICK : CALM) * (round % 3 ? 1 : 100);
            for (int i = 0; i < ROWS * N; i++)
                w[i] = random_float(round % 2 ? SICK : CALM) * (round % 3 ? 1 : 100);
            for (int r = 0; r < ROWS; r++)
                b[r] = random_float(CALM);
            rounded_products(out, x, &(matrix){w, COLIBRI_F32, ROWS, N}, &(matrix){b, COLIBRI_F32, 1, ROWS}, 1, ROWS, format);
            rounded_scores(scores, x, w, N, ROWS, N, 0.3f, format);
            memset(sum, 0, sizeof sum);
            for (int r = 0; r < ROWS; r++)
                rounded_add_scaled(sum, b[r], w + r * N, N, format);
            for (int r = 0; r < ROWS; r++) {
                float dot = slow_dot(x, w + r * N, N, how);
                CHECK(r == 0 || same(out[r], one(dot + b[r], how)));
                CHECK(same(scores[r], dot * 0.3f));
            }
            for (int i = 0; i < N; i++) {
                float chain = 0;
                for (int r = 0; r < ROWS; r++)
                    chain = one(fmaf(b[r], w[r * N + i], chain), how);
                CHECK(same(sum[i], chain));
            }
        }
}

static void test_sums_kept_in_float32_are_those_of_the_kernels(void)
{
    enum { N = 100, ROWS = 5 };
    const kernels *k = kernels_in_force();
    float x[N], out[ROWS], want[ROWS];
    for (colibri_dtype dtype = COLIBRI_F32; dtype <= COLIBRI_BF16; dtype++) {
        float w[ROWS * N]; /* of this dtype, which may take half of it */
        for (int i = 0; i < ROWS * N; i++)
            put_as((char *)w + i * (int)colibri_dtype_size(dtype), dtype, random_float(CALM));
        for (int i = 0; i < N; i++)
            x[i] = random_float(CALM);
        matrix m = {w, dtype, ROWS, N}, no_bias = {0};
        rounded_products(out, x, &m, &no_bias, 0, ROWS, COLIBRI_FLOAT32);
        k->matmul(want, ROWS, x, 1, &m, &no_bias, 0, ROWS, NULL);
        CHECK(memcmp(out, want, sizeof out) == 0);
    }
}

int main(int argc, char **argv)
{
    all = argc > 1 && strcmp(argv[1], "all") == 0;
    for (list *f = lists; f < lists + N_LISTS; f++)
        fill(f);
    RUN(test_every_value_goes_to_the_nearest_number_of_the_format);
    RUN(test_numbers_of_the_format_stay_and_halfway_points_go_to_the_even_one);
    RUN(test_float32_is_left_alone_but_for_the_flags);
    RUN(test_overflow_begins_where_rounding_passes_the_largest_number);
    RUN(test_I1_the_rounding_mode_of_the_process_has_no_say);
    RUN(test_partial_sums_are_rounded_one_by_one);
    RUN(test_sums_kept_in_float32_are_those_of_the_kernels);
    return 0;
}
