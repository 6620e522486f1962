/* kernel_checks.h: one table of kernels against the scalar definition, by bytes: all lengths from 1 to 70, rows that end at a
 * page nobody may touch, odd addresses, and numbers of every mood. */
#ifndef COLIBRI_TESTS_KERNEL_CHECKS_H
#define COLIBRI_TESTS_KERNEL_CHECKS_H

#include "../../csrc/kernels/tables.h"
#include "numbers.h"

#define MOST 1100
static const int lengths[] = {
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30,
    31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57,
    58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 96, 127, 128, 129, 200, 257, 1024, 1039};
enum { N_LENGTHS = sizeof lengths / sizeof lengths[0] };

static const float canary = 0x1.234568p-7f; /* in places that nobody may write */

/* A guarded row of n random floats. */
static inline guarded random_row(int64_t n, enum mood mood)
{
    guarded row = guarded_new((size_t)n * sizeof(float), 0);
    for (int64_t i = 0; i < n; i++)
        ((float *)row.data)[i] = random_float(mood);
    return row;
}

static inline guarded random_matrix(matrix *w, colibri_dtype dtype, int64_t rows, int64_t cols, enum mood mood, size_t slack)
{
    size_t size = dtype == COLIBRI_F32 ? 4 : 2;
    guarded memory = guarded_new((size_t)(rows * cols) * size, slack);
    for (int64_t i = 0; i < rows * cols; i++)
        put_as(memory.data + (size_t)i * size, dtype, random_float(mood));
    *w = (matrix){memory.data, dtype, rows, cols};
    return memory;
}

static inline guarded copy_of(guarded from, int64_t n)
{
    guarded copy = guarded_new((size_t)n * sizeof(float), 0);
    memcpy(copy.data, from.data, (size_t)n * sizeof(float));
    return copy;
}

/* The product of up to MATMUL_ROWS rows of up to MOST floats, packed first. */
static inline void multiply(const kernels *table, float *out, int64_t out_stride, const float *x, int64_t x_stride, int64_t m,
                            const matrix *w, const matrix *bias, int64_t first, int64_t last)
{
    float *packed = malloc((size_t)packed_floats(m, w->cols) * sizeof(float));
    float *scratch = malloc((size_t)matmul_scratch(w->cols) * sizeof(float));
    table->pack(packed, x, x_stride, m, w->cols);
    table->matmul(out, out_stride, packed, m, w, bias, first, last, scratch);
    free(packed);
    free(scratch);
}

static inline void check_matmul_case(const kernels *table, colibri_dtype dtype, int64_t m, int64_t rows, int64_t cols,
                                     enum mood mood)
{
    matrix w, bias;
    guarded w_memory = random_matrix(&w, dtype, rows, cols, mood, (size_t)random_below(4));
    guarded bias_memory = random_matrix(&bias, (colibri_dtype)random_below(3), 1, rows, mood, (size_t)random_below(4));
    const matrix *added = random_below(2) ? &bias : NULL;
    int64_t x_stride = cols + random_below(3), out_stride = rows + random_below(3), first = random_below((int)rows),
            last = random_below(2) ? rows : first + 1 + random_below((int)(rows - first));
    guarded x = random_row((m - 1) * x_stride + cols, mood);
    float got[9 * 40], want[9 * 40];
    CHECK(m * out_stride <= 9 * 40);
    for (int i = 0; i < 9 * 40; i++)
        got[i] = want[i] = canary;
    multiply(&kernels_scalar, want, out_stride, (float *)x.data, x_stride, m, &w, added, first, last);
    multiply(table, got, out_stride, (float *)x.data, x_stride, m, &w, added, first, last);
    CHECK(same_numbers(got, want, 9 * 40));
    for (int64_t i = 0; i < m; i++)
        for (int64_t r = 0; r < rows; r++)
            CHECK((r < first || r >= last) == (float_bits(want[i * out_stride + r]) == float_bits(canary)));
    guarded_free(x);
    guarded_free(bias_memory);
    guarded_free(w_memory);
}

static inline void check_matmul(const kernels *table)
{
    for (int dtype = COLIBRI_F32; dtype <= COLIBRI_BF16; dtype++)
        for (int mood = 0; mood < N_MOODS; mood++) {
            for (int l = 0; l < N_LENGTHS; l++)
                check_matmul_case(table, (colibri_dtype)dtype, 1 + random_below(9), 1 + random_below(20), lengths[l],
                                  (enum mood)mood);
            for (int m = 1; m <= 9; m++)
                for (int rows = 1; rows <= 37; rows += rows < 20 ? 1 : 17)
                    check_matmul_case(table, (colibri_dtype)dtype, m, rows, 1 + random_below(50), (enum mood)mood);
        }
}

/* Many rows, and rows so long that their columns are taken in blocks. */
static inline void check_large_matmul(const kernels *table)
{
    enum { ROWS = 2 * MATMUL_GROUP + 5 };
    static float got[MATMUL_ROWS * ROWS], want[MATMUL_ROWS * ROWS];
    static const int ms[] = {2, 15, 16, 21, 47, 48, 53, 79, MATMUL_ROWS};
    static const int cols[] = {3, 16, 40, 1024, 1025, 1100, 2049, 3600, 4097};
    enum { CASES = sizeof ms / sizeof *ms };
    for (int dtype = COLIBRI_F32; dtype <= COLIBRI_BF16; dtype++)
        for (int i = 0; i < CASES; i++) {
            matrix w;
            int64_t m = ms[i], n = cols[(i + 2 * dtype + random_below(CASES)) % CASES];
            guarded w_memory = random_matrix(&w, (colibri_dtype)dtype, ROWS, n, (enum mood)random_below(N_MOODS), 1);
            guarded x = random_row(m * n, (enum mood)random_below(N_MOODS));
            int64_t first = random_below(MATMUL_GROUP), last = ROWS - random_below(MATMUL_GROUP);
            for (int64_t j = 0; j < m * ROWS; j++)
                got[j] = want[j] = canary;
            multiply(&kernels_scalar, want, ROWS, (float *)x.data, n, m, &w, NULL, first, last);
            multiply(table, got, ROWS, (float *)x.data, n, m, &w, NULL, first, last);
            CHECK(same_numbers(got, want, m * ROWS));
            guarded_free(w_memory);
            guarded_free(x);
        }
}

/* Kernels from one row to one row: `in_place` runs them with out == x as the contract allows. */
typedef void (*map_kernel)(const kernels *table, float *out, const float *x, const float *y, int64_t n);

static inline void call_exp(const kernels *table, float *out, const float *x, const float *y, int64_t n)
{
    (void)y;
    table->exp(out, x, n);
}

static inline void call_sigmoid(const kernels *table, float *out, const float *x, const float *y, int64_t n)
{
    (void)y;
    table->sigmoid(out, x, n);
}

static inline void call_silu_mul(const kernels *table, float *out, const float *x, const float *y, int64_t n)
{
    table->silu_mul(out, x, y, n);
}

static inline void call_add(const kernels *table, float *out, const float *x, const float *y, int64_t n)
{
    table->add(out, x, y, n);
}

static inline void call_softmax(const kernels *table, float *out, const float *x, const float *y, int64_t n)
{
    table->softmax(out, x, n, (int64_t)(float_bits(y[0]) % 100)); /* any first key; the same for both tables */
}

static inline void call_rms_norm(const kernels *table, float *out, const float *x, const float *y, int64_t n)
{
    matrix w = {y, COLIBRI_F32, 1, n};
    table->rms_norm(out, x, &w, n, 1e-6f);
}

static inline void check_map(const kernels *table, map_kernel call)
{
    for (int mood = 0; mood < N_MOODS; mood++)
        for (int l = 0; l < N_LENGTHS; l++) {
            int64_t n = lengths[l];
            guarded x = random_row(n, (enum mood)mood), y = random_row(n, (enum mood)mood);
            guarded want = random_row(n, CALM), got = random_row(n, CALM);
            guarded in_place = copy_of(x, n);
            call(&kernels_scalar, (float *)want.data, (float *)x.data, (float *)y.data, n);
            call(table, (float *)got.data, (float *)x.data, (float *)y.data, n);
            call(table, (float *)in_place.data, (float *)in_place.data, (float *)y.data, n);
            CHECK(same_numbers((float *)got.data, (float *)want.data, n));
            CHECK(same_numbers((float *)in_place.data, (float *)want.data, n));
            guarded_free(x);
            guarded_free(y);
            guarded_free(want);
            guarded_free(got);
            guarded_free(in_place);
        }
}

static inline void check_norm_weights(const kernels *table)
{
    for (int dtype = COLIBRI_F32; dtype <= COLIBRI_BF16; dtype++)
        for (int l = 0; l < N_LENGTHS; l++) {
            matrix w;
            float want[MOST], got[MOST];
            guarded w_memory = random_matrix(&w, (colibri_dtype)dtype, 1, lengths[l], SICK, (size_t)random_below(4));
            guarded x = random_row(lengths[l], CALM);
            kernels_scalar.rms_norm(want, (float *)x.data, &w, lengths[l], 1e-5f);
            table->rms_norm(got, (float *)x.data, &w, lengths[l], 1e-5f);
            CHECK(same_numbers(got, want, lengths[l]));
            guarded_free(x);
            guarded_free(w_memory);
        }
}

static inline void check_widen(const kernels *table)
{
    float want[MOST], got[MOST];
    for (int dtype = COLIBRI_F32; dtype <= COLIBRI_BF16; dtype++)
        for (int l = 0; l < N_LENGTHS; l++) {
            matrix w;
            guarded memory = random_matrix(&w, (colibri_dtype)dtype, 1, lengths[l], SICK, (size_t)random_below(4));
            kernels_scalar.widen(want, w.data, w.dtype, lengths[l]);
            table->widen(got, w.data, w.dtype, lengths[l]);
            CHECK(same_numbers(got, want, lengths[l]));
            guarded_free(memory);
        }
    for (uint32_t first = 0; first < 0x10000; first += 16) /* every half number, and no NaN signals afterwards */
        for (int dtype = COLIBRI_F16; dtype <= COLIBRI_BF16; dtype++) {
            uint16_t halves[16];
            for (int i = 0; i < 16; i++)
                halves[i] = (uint16_t)(first + (uint32_t)i);
            kernels_scalar.widen(want, halves, (colibri_dtype)dtype, 16);
            table->widen(got, halves, (colibri_dtype)dtype, 16);
            CHECK(same_numbers(got, want, 16));
            for (int i = 0; i < 16; i++)
                CHECK(got[i] == got[i] || (float_bits(got[i]) & 0x00400000) != 0);
        }
}

static inline void check_magnitudes(const kernels *table) /* against one value at a time */
{
    for (int mood = 0; mood < N_MOODS; mood++)
        for (int64_t n = 0; n < 140; n++) {
            guarded x = random_row(n, (enum mood)mood);
            uint32_t largest = 0, least = UINT32_MAX, found_largest, found_least;
            for (int64_t i = 0; i < n; i++) {
                uint32_t bits = float_bits(((float *)x.data)[i]) & 0x7fffffff;
                if (bits > largest)
                    largest = bits;
                if (bits != 0 && bits - 1 < least)
                    least = bits - 1;
            }
            table->magnitudes(&found_largest, &found_least, x.data, n);
            CHECK(found_largest == largest && found_least == least);
            guarded_free(x);
        }
}

static inline void check_rows_of_keys(const kernels *table) /* scores, weighted_sum */
{
    for (int mood = 0; mood < N_MOODS; mood++)
        for (int l = 0; l < N_LENGTHS; l++) {
            int64_t dim = lengths[l], n = random_below(21), stride = dim + random_below(4);
            float want[MOST], got[MOST];
            guarded q = random_row(dim, (enum mood)mood), weight = random_row(n, (enum mood)mood);
            guarded rows = random_row(n == 0 ? 0 : (n - 1) * stride + dim, (enum mood)mood);
            kernels_scalar.scores(want, (float *)q.data, (float *)rows.data, stride, n, dim, 0.088388346f);
            table->scores(got, (float *)q.data, (float *)rows.data, stride, n, dim, 0.088388346f);
            CHECK(same_numbers(got, want, n));
            guarded out = random_row(dim, CALM);
            int64_t part = random_below((int)n + 1);
            kernels_scalar.weighted_sum(want, (float *)weight.data, (float *)rows.data, stride, n, dim, false);
            table->weighted_sum((float *)out.data, (float *)weight.data, (float *)rows.data, stride, n, dim, false);
            CHECK(same_numbers((float *)out.data, want, dim));
            table->weighted_sum((float *)out.data, (float *)weight.data, (float *)rows.data, stride, part, dim, false);
            table->weighted_sum((float *)out.data, (float *)weight.data + part, (float *)rows.data + (n == 0 ? 0 : part * stride),
                                stride, n - part, dim, true); /* a chain in two pieces is the same chain */
            CHECK(same_numbers((float *)out.data, want, dim));
            guarded_free(q);
            guarded_free(weight);
            guarded_free(rows);
            guarded_free(out);
        }
}

static inline void check_in_place(const kernels *table) /* add_scaled, clamp, rotate_half */
{
    for (int mood = 0; mood < N_MOODS; mood++)
        for (int l = 0; l < N_LENGTHS; l++) {
            int64_t n = lengths[l];
            guarded x = random_row(n, (enum mood)mood), want = random_row(n, (enum mood)mood), got = copy_of(want, n);
            float factor = random_float((enum mood)mood);
            kernels_scalar.add_scaled((float *)want.data, factor, (float *)x.data, n);
            table->add_scaled((float *)got.data, factor, (float *)x.data, n);
            CHECK(same_numbers((float *)got.data, (float *)want.data, n));
            kernels_scalar.clamp((float *)want.data, n, 1.25f);
            table->clamp((float *)got.data, n, 1.25f);
            CHECK(same_numbers((float *)got.data, (float *)want.data, n));
            guarded_free(want);
            guarded_free(got);

            guarded cos = random_row(n, CALM), sin = random_row(n, CALM);
            want = random_row(2 * n, (enum mood)mood);
            got = copy_of(want, 2 * n);
            kernels_scalar.rotate_half((float *)want.data, (float *)cos.data, (float *)sin.data, n);
            table->rotate_half((float *)got.data, (float *)cos.data, (float *)sin.data, n);
            CHECK(same_numbers((float *)got.data, (float *)want.data, 2 * n));
            guarded_free(want);
            guarded_free(got);
            guarded_free(x);
            guarded_free(cos);
            guarded_free(sin);
        }
}

static inline void check_fma(const kernels *table, float factor, float x, float c)
{
    float want = c, got[5] = {c, 1, c, c, c}, xs[5] = {x, 1, x, x, x};
    kernels_scalar.add_scaled(&want, factor, &x, 1);
    table->add_scaled(got, factor, xs, 5);
    for (int i = 0; i < 5; i++)
        CHECK(i == 1 || same_number(got[i], want));
}

/* Sums on a tie of two floats, or a hair beside one that no double shows. */
static inline void check_fma_at_ties(const kernels *table)
{
    const float hair[] = {1 - 0x1p-23f, 1, 1 + 0x1p-23f};
    for (int i = 0; i < 100000; i++) {
        float one = hair[random_below(3)] * (random_below(2) ? 1 : -1), other = hair[random_below(3)];
        uint32_t mantissa = random_below(4) ? random_bits() & 0x007fffff : 0x007fffff - (uint32_t)random_below(2);
        check_fma(table, one * 0x1p-12f, other * 0x1p-12f, float_from_bits(0x3f800000 | mantissa)); /* half an ulp of 1 */
        check_fma(table, one * 0x1p-75f, other * 0x1p-75f, float_from_bits(mantissa)); /* half the smallest float */
        check_fma(table, one * 0x1p52f, other * 0x1p51f, float_from_bits(0x7f000000 | mantissa)); /* half an ulp, to overflow */
    }
}

/* Every `step`-th of the 2^32 floats. */
static inline void check_exp_of_all(const kernels *table, uint32_t step)
{
    float x[256], want[256], got[256];
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32;) {
        for (int i = 0; i < 256; i++, bits += step)
            x[i] = float_from_bits((uint32_t)bits);
        kernels_scalar.exp(want, x, 256);
        table->exp(got, x, 256);
        CHECK(same_numbers(got, want, 256));
    }
}

static inline void check_table(const kernels *table)
{
    check_matmul(table);
    check_large_matmul(table);
    check_map(table, call_exp);
    check_map(table, call_sigmoid);
    check_map(table, call_silu_mul);
    check_map(table, call_add);
    check_map(table, call_softmax);
    check_map(table, call_rms_norm);
    check_norm_weights(table);
    check_widen(table);
    check_magnitudes(table);
    check_rows_of_keys(table);
    check_in_place(table);
    check_fma_at_ties(table);
    check_exp_of_all(table, 4099);
}

#endif
