/* test_kernels.c: the scalar definition against plain double arithmetic and against known answers; every other table against the
 * scalar one. */
#define _DEFAULT_SOURCE
#include "kernel_checks.h"

static void test_B2_matmul_lies_within_the_rounding_bound_of_the_double_product(void)
{
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t < n_tables; t++)
        for (int dtype = COLIBRI_F32; dtype <= COLIBRI_BF16; dtype++)
            for (int cols = 1; cols <= 1037; cols = cols * 3 + 1) {
                enum { ROWS = 7, M = 5 };
                matrix w, bias;
                guarded w_memory = random_matrix(&w, (colibri_dtype)dtype, ROWS, cols, CALM, 0);
                guarded bias_memory = random_matrix(&bias, COLIBRI_BF16, 1, ROWS, CALM, 0);
                guarded x = random_row((int64_t)M * cols, CALM);
                float out[M * ROWS];
                multiply(tables[t], out, ROWS, (float *)x.data, cols, M, &w, &bias, 0, ROWS);
                for (int i = 0; i < M; i++)
                    for (int r = 0; r < ROWS; r++) {
                        double sum = element_f32(bias.data, COLIBRI_BF16, r), size = fabs(sum);
                        for (int k = 0; k < cols; k++) {
                            double term = element_f32(w.data, w.dtype, (int64_t)r * cols + k);
                            term *= ((float *)x.data)[i * cols + k];
                            sum += term;
                            size += fabs(term);
                        }
                        /* a lane of cols/16 terms, four folds, the bias: each rounding is at most 2^-24 of the sum of sizes */
                        CHECK(fabs(out[i * ROWS + r] - sum) <= (cols / 16 + 6) * 0x1p-24 * size);
                    }
                guarded_free(w_memory);
                guarded_free(bias_memory);
                guarded_free(x);
            }
}

static void test_a_dot_product_takes_16_lanes_and_folds_them_in_halves(void)
{
    /* 2^24 + 1 is lost in float32, so the result tells which elements met first. */
    float x[40], w[40] = {0}, out;
    matrix row = {w, COLIBRI_F32, 1, 40};
    for (int i = 0; i < 40; i++)
        x[i] = 1;
    w[0] = 0x1p24f, w[16] = 1, w[32] = 1, w[8] = -0x1p24f; /* lane 0: 2^24 + 1 + 1 loses both ones; then lane 8 */
    multiply(&kernels_scalar, &out, 1, x, 40, 1, &row, NULL, 0, 1);
    CHECK(out == 0);
    w[0] = 0x1p24f, w[16] = 0, w[32] = 0, w[1] = 1, w[9] = 1; /* lanes 1 and 9 meet in the first fold, before lane 0's sum */
    multiply(&kernels_scalar, &out, 1, x, 40, 1, &row, NULL, 0, 1);
    CHECK(out == 2);
    w[8] = 0, w[9] = 0, w[2] = 1; /* 2^24 + lane 2 in the third fold, + lane 1 in the last: both lost */
    multiply(&kernels_scalar, &out, 1, x, 40, 1, &row, NULL, 0, 1);
    CHECK(out == 0x1p24f);
    w[2] = 0, w[3] = 1; /* lane 3 meets lane 1 first: 2 arrives */
    multiply(&kernels_scalar, &out, 1, x, 40, 1, &row, NULL, 0, 1);
    CHECK(out == 0x1p24f + 2);
}

static void test_a_product_is_not_rounded_before_the_sum(void)
{
    float x[17] = {0}, w[17] = {0}, out;
    matrix row = {w, COLIBRI_F32, 1, 17};
    x[0] = 1 + 0x1p-12f, w[0] = 1 - 0x1p-12f; /* 1 - 2^-24, a tie in float32 */
    x[16] = -1, w[16] = 1;
    multiply(&kernels_scalar, &out, 1, x, 17, 1, &row, NULL, 0, 1);
    CHECK(out == -0x1p-24f);
}

static void test_lanes_beyond_the_end_take_part_in_no_arithmetic(void)
{
    /* A product that underflows leaves -0 in its lane; fma(0, 0, -0) would turn it into +0. One element in each lane keeps the
     * fold at -0. */
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t < n_tables; t++)
        for (int n = 16; n < 32; n++) {
            float x[32], w[32], out = 1;
            matrix row = {w, COLIBRI_F32, 1, n};
            for (int i = 0; i < 32; i++)
                x[i] = -0x1p-100f, w[i] = 0x1p-100f;
            multiply(tables[t], &out, 1, x, n, 1, &row, NULL, 0, 1);
            CHECK(float_bits(out) == 0x80000000);
        }
}

static void test_every_table_gives_the_bytes_of_the_scalar_one(void)
{
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t < n_tables; t++) {
        check_table(tables[t]);
        printf("   %s agrees with scalar\n", tables[t]->name);
    }
}

static void test_one_row_or_many_give_the_same_bytes(void)
{
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t < n_tables; t++) {
        enum { M = 63, ROWS = 33, COLS = 150 };
        static float together[M * ROWS], alone[M * ROWS];
        matrix w;
        guarded w_memory = random_matrix(&w, COLIBRI_BF16, ROWS, COLS, SICK, 1), x = random_row((int64_t)M * COLS, SICK);
        multiply(tables[t], together, ROWS, (float *)x.data, COLS, M, &w, NULL, 0, ROWS);
        for (int i = 0; i < M; i++)
            for (int r = 0; r < ROWS; r++)
                multiply(tables[t], alone + i * ROWS, ROWS, (float *)x.data + i * COLS, COLS, 1, &w, NULL, r, r + 1);
        CHECK(same_numbers(together, alone, (int64_t)M * ROWS));
        guarded_free(w_memory);
        guarded_free(x);
    }
}

static void test_a_softmax_row_sums_by_absolute_key(void)
{
    /* Keys 5 .. 44 as a window of a row in which everything else is -Inf (whose exp is +0): the same lanes, so the same bytes. */
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t < n_tables; t++) {
        float whole[64], window[40], p_whole[64], p_window[40];
        for (int i = 0; i < 64; i++) {
            whole[i] = i < 5 || i >= 45 ? -INFINITY : random_uniform() * 10;
            if (i >= 5 && i < 45)
                window[i - 5] = whole[i];
        }
        tables[t]->softmax(p_whole, whole, 64, 0);
        tables[t]->softmax(p_window, window, 40, 5);
        CHECK(same_numbers(p_window, p_whole + 5, 40));
        double sum = 0;
        for (int i = 0; i < 40; i++)
            sum += p_window[i];
        CHECK(fabs(sum - 1) < 1e-6);
    }
}

static void test_softmax_of_nan_and_infinity_stays_ieee(void)
{
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables);
    for (size_t t = 0; t < n_tables; t++)
        for (int at = 0; at < 20; at++) {
            float x[20], p[20];
            for (int i = 0; i < 20; i++)
                x[i] = (float)i;
            x[at] = NAN; /* wins the maximum: the whole row */
            tables[t]->softmax(p, x, 20, 0);
            for (int i = 0; i < 20; i++)
                CHECK(p[i] != p[i]);
            x[at] = -INFINITY; /* a weight of exactly 0 */
            tables[t]->softmax(p, x, 20, 0);
            CHECK(p[at] == 0 && p[(at + 1) % 20] > 0);
            for (int i = 0; i < 20; i++)
                x[i] = -INFINITY; /* Inf - Inf */
            tables[t]->softmax(p, x, 20, 0);
            CHECK(p[at] != p[at]);
        }
}

static void test_norm_and_activations_match_their_formulas(void)
{
    enum { N = 77 };
    float x[N], up[N], w[N], out[N];
    matrix weight = {w, COLIBRI_F32, 1, N};
    double squares = 0;
    for (int i = 0; i < N; i++) {
        x[i] = random_uniform() * 5, up[i] = random_uniform(), w[i] = random_uniform();
        squares += (double)x[i] * x[i];
    }
    kernels_scalar.rms_norm(out, x, &weight, N, 1e-5f);
    for (int i = 0; i < N; i++)
        CHECK(fabs(out[i] - w[i] * (x[i] / sqrt(squares / N + 1e-5))) <= 8 * 0x1p-24 * fabs(out[i]));
    kernels_scalar.silu_mul(out, x, up, N);
    for (int i = 0; i < N; i++)
        CHECK(fabs(out[i] - x[i] / (1 + exp(-(double)x[i])) * up[i]) <= 6 * 0x1p-24 * fabs(out[i]));
    kernels_scalar.sigmoid(out, x, N);
    for (int i = 0; i < N; i++)
        CHECK(fabs(out[i] - 1 / (1 + exp(-(double)x[i]))) <= 6 * 0x1p-24 * out[i]);
}

static void test_B2_a_product_beyond_the_range_of_f16_comes_back(void)
{
    float x = 700, up_to = 0;
    uint16_t hundred = 0x5640; /* 100 in f16; 700 * 100 = 70,000 is Inf there */
    matrix w = {&hundred, COLIBRI_F16, 1, 1};
    float y;
    multiply(&kernels_scalar, &y, 1, &x, 1, 1, &w, NULL, 0, 1);
    kernels_scalar.add_scaled(&up_to, 0.1f, &y, 1);
    CHECK(y == 70000 && fabsf(up_to - 7000) < 0.001f);
}

static void test_the_ladder_ends_in_scalar_and_the_table_in_force_is_on_it(void)
{
    const kernels *const *tables;
    size_t n_tables = kernels_available(&tables), found = 0;
    CHECK(n_tables >= 1 && strcmp(tables[n_tables - 1]->name, kernels_scalar.name) == 0);
    for (size_t t = 0; t < n_tables; t++)
        found += tables[t] == kernels_in_force();
    CHECK(found == 1);
}

int main(void)
{
    RUN(test_a_dot_product_takes_16_lanes_and_folds_them_in_halves);
    RUN(test_a_product_is_not_rounded_before_the_sum);
    RUN(test_lanes_beyond_the_end_take_part_in_no_arithmetic);
    RUN(test_B2_matmul_lies_within_the_rounding_bound_of_the_double_product);
    RUN(test_B2_a_product_beyond_the_range_of_f16_comes_back);
    RUN(test_norm_and_activations_match_their_formulas);
    RUN(test_one_row_or_many_give_the_same_bytes);
    RUN(test_a_softmax_row_sums_by_absolute_key);
    RUN(test_softmax_of_nan_and_infinity_stays_ieee);
    RUN(test_every_table_gives_the_bytes_of_the_scalar_one);
    RUN(test_the_ladder_ends_in_scalar_and_the_table_in_force_is_on_it);
    return 0;
}
