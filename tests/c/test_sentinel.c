/* test_sentinel.c: what bit patterns say of an array, against a count of one element at a time by another rule. */
#define _DEFAULT_SOURCE
#include "../../csrc/kernels/kernels.h"
#include "numbers.h"

typedef struct format {
    colibri_dtype dtype;
    int bits, mantissa; /* of the whole, and of the fraction */
} format;

static const format formats[] = {{COLIBRI_F32, 32, 23}, {COLIBRI_F16, 16, 10}, {COLIBRI_BF16, 16, 7}};

static uint32_t element(const unsigned char *data, const format *f, int64_t i)
{
    uint32_t bits = 0;
    for (int b = f->bits / 8; b-- > 0;)
        bits = bits << 8 | data[i * (f->bits / 8) + b];
    return bits;
}

static void put(unsigned char *data, const format *f, int64_t i, uint32_t bits)
{
    for (int b = 0; b < f->bits / 8; b++)
        data[i * (f->bits / 8) + b] = (unsigned char)(bits >> 8 * b);
}

static sentinel one_by_one(const unsigned char *data, const format *f, int64_t n)
{
    sentinel s = {.first = -1};
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = element(data, f, i), fraction = bits % (1u << f->mantissa);
        uint32_t exponent = bits >> f->mantissa & ((1u << (f->bits - 1 - f->mantissa)) - 1);
        bool special = exponent + 1 == 1u << (f->bits - 1 - f->mantissa), negative = bits >> (f->bits - 1) != 0;
        s.n_nan += special && fraction != 0;
        s.n_signalling += special && fraction != 0 && fraction < 1u << (f->mantissa - 1);
        s.n_inf += special && fraction == 0;
        s.n_negative_inf += special && fraction == 0 && negative;
        s.n_subnormal += exponent == 0 && fraction != 0;
        if (special && s.first < 0) {
            s.first = i;
            s.first_bits = bits;
        }
        uint32_t magnitude = exponent << f->mantissa | fraction;
        if (!special && magnitude > s.largest)
            s.largest = magnitude;
    }
    return s;
}

static bool same(const sentinel *a, const sentinel *b)
{
    return a->n_nan == b->n_nan && a->n_signalling == b->n_signalling && a->n_inf == b->n_inf &&
           a->n_negative_inf == b->n_negative_inf && a->n_subnormal == b->n_subnormal && a->largest == b->largest &&
           a->first_bits == b->first_bits && a->first == b->first;
}

static void check(const unsigned char *data, const format *f, int64_t n)
{
    sentinel found = sentinel_scan(data, f->dtype, n), expected = one_by_one(data, f, n);
    CHECK(same(&found, &expected));
}

static void test_I2_the_engine_s_own_counter_is_exact_in_this_build(void)
{
    const uint32_t words[] = {0x7fc00000, 0x7f800000, 0xff800000, 0x7f800001, 0xffc00000, 0x00000001,
                              0x807fffff, 0x00000000, 0x80000000, 0x00800000, 0x7f7fffff, 0xff7fffff};
    sentinel s = sentinel_scan(words, COLIBRI_F32, 12);
    CHECK(s.n_nan == 3 && s.n_signalling == 1 && s.n_inf == 2 && s.n_negative_inf == 1 && s.n_subnormal == 2);
    CHECK(s.largest == 0x7f7fffff && s.first == 0 && s.first_bits == 0x7fc00000);
    s = sentinel_scan(words + 5, COLIBRI_F32, 5);
    CHECK(s.first == -1 && s.n_subnormal == 2 && s.largest == 0x00800000);
    s = sentinel_scan(words, COLIBRI_F32, 5);
    CHECK(s.largest == 0 && s.n_nan + s.n_inf == 5);
#if defined(__FINITE_MATH_ONLY__)
    CHECK(__FINITE_MATH_ONLY__ == 0); /* float32.h refuses such a build */
#endif
}

static void test_every_class_of_every_format_is_told_apart(void)
{
    enum { LOW = 5 };
    const uint32_t low[LOW] = {0, 1, 0x7fff, 0x8000, 0xffff};
    static unsigned char data[4 * LOW * 65536];
    for (size_t k = 0; k < sizeof formats / sizeof *formats; k++) {
        const format *f = &formats[k];
        int64_t n = f->bits == 32 ? LOW * 65536 : 65536;
        for (int64_t i = 0; i < n; i++)
            put(data, f, i, f->bits == 32 ? (uint32_t)(i / LOW) << 16 | low[i % LOW] : (uint32_t)i);
        check(data, f, n);
        for (int64_t i = 0; i < n; i += 97) /* alone, so that nothing else hides it */
            check(data + i * f->bits / 8, f, 1);
    }
}

static void test_one_odd_value_among_many_ordinary_ones_is_counted(void)
{
    enum { MANY = 10000 }; /* more than are looked at together */
    static uint32_t words[MANY];
    const uint32_t odd[] = {0x7fc00001, 0xff800000, 0x7f800001, 1, 0x807fffff, 0, 0x80000000, 0x00800000, 0x7f7fffff};
    for (size_t k = 0; k < sizeof odd / sizeof *odd; k++)
        for (int round = 0; round < 50; round++) {
            for (int64_t i = 0; i < MANY; i++)
                words[i] = 0x3f000000 | (random_bits() & 0x807fffff);
            words[random_below(MANY)] = odd[k];
            check((unsigned char *)words, &formats[0], MANY);
        }
}

static void test_every_length_and_address_is_counted_whole_and_no_further(void)
{
    for (size_t k = 0; k < sizeof formats / sizeof *formats; k++)
        for (int64_t n = 0; n < 140; n++) {
            const format *f = &formats[k];
            guarded memory = guarded_new((size_t)(n * f->bits / 8), (size_t)random_below(4));
            for (int round = 0; round < 8; round++) {
                for (int64_t i = 0; i < n; i++) {
                    uint32_t bits = random_bits();
                    put(memory.data, f, i, round % 2 == 0 ? bits : bits & ~(1u << (f->mantissa + 1)));
                }
                check(memory.data, f, n);
            }
            guarded_free(memory);
        }
}

static void test_one_value_at_any_place_of_a_long_array_is_found(void)
{
    const int64_t n = 4096 * 3 + 77; /* several of the pieces in which it is looked at */
    const int64_t places[] = {0, 15, 4095, 4096, 8191, 8192, 12288, n - 1};
    const uint32_t kinds[] = {0x7fc00000, 0xffc00001, 0x7fa5a5a5, 0x7f800000, 0xff800000, 0x00000001, 0x80400000};
    guarded memory = guarded_new((size_t)n * 4, 1);
    for (size_t p = 0; p < sizeof places / sizeof *places; p++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            for (int64_t i = 0; i < n; i++)
                put(memory.data, &formats[0], i, 0x3f800000 + (uint32_t)i);
            put(memory.data, &formats[0], places[p], kinds[k]);
            check(memory.data, &formats[0], n);
        }
    guarded_free(memory);
}

int main(void)
{
    RUN(test_I2_the_engine_s_own_counter_is_exact_in_this_build);
    RUN(test_every_class_of_every_format_is_told_apart);
    RUN(test_one_odd_value_among_many_ordinary_ones_is_counted);
    RUN(test_every_length_and_address_is_counted_whole_and_no_further);
    RUN(test_one_value_at_any_place_of_a_long_array_is_found);
    return 0;
}
