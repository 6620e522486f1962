/* Widening and counting over arrays of any strides. */
#include <math.h>

#include "check.h"
#include "colibri.h"

static void test_widen_follows_strides_and_dtype(void)
{
    const uint16_t bf16[6] = {0x3F80, 0x4000, 0x4040, 0x7FC0, 0xFF80, 0xBF80}; /* 1 2 3 NaN -Inf -1 */
    colibri_array columns = {
        .data = bf16, .dtype = COLIBRI_BF16, .n_dims = 2, .shape = {3, 2}, .strides = {2, 6}}; /* a transpose */
    float out[6];
    colibri_message message;
    CHECK_OK(colibri_array_widen(&columns, out, &message), message);
    CHECK(out[0] == 1 && isnan(out[1]) && out[2] == 2 && out[3] == -INFINITY && out[4] == 3 && out[5] == -1);

    colibri_array backwards = {.data = bf16 + 2, .dtype = COLIBRI_BF16, .n_dims = 1, .shape = {3}, .strides = {-2}};
    CHECK_OK(colibri_array_widen(&backwards, out, &message), message);
    CHECK(out[0] == 3 && out[1] == 2 && out[2] == 1);

    colibri_array scalar = {.data = bf16 + 1, .dtype = COLIBRI_BF16};
    CHECK_OK(colibri_array_widen(&scalar, out, &message), message);
    CHECK(out[0] == 2);
}

static void test_census_counts_bits_and_says_where_the_first_is(void)
{
    float grid[4][6];
    uint32_t quiet = 0x7FC00000, signalling = 0x7F800001, negative = 0xFFC00000, inf = 0x7F800000, small = 1;
    for (int i = 0; i < 24; i++)
        grid[i / 6][i % 6] = 1;
    memcpy(&grid[0][5], &quiet, 4); /* outside the view below */
    memcpy(&grid[1][1], &small, 4);
    memcpy(&grid[1][3], &inf, 4);
    memcpy(&grid[2][0], &signalling, 4);
    memcpy(&grid[3][4], &negative, 4);
    colibri_array view = {.data = grid, .dtype = COLIBRI_F32, .n_dims = 2, .shape = {4, 5}, .strides = {24, 4}};
    colibri_census c;
    colibri_message message;
    CHECK_OK(colibri_array_census(&view, &c, &message), message);
    CHECK(c.n_nan == 2 && c.n_inf == 1 && c.n_subnormal == 1 && c.first_nonfinite == 8);
}

static void test_an_empty_array_has_nothing_to_count(void)
{
    colibri_array empty = {.data = NULL, .dtype = COLIBRI_F32, .n_dims = 2, .shape = {0, 5}, .strides = {20, 4}};
    colibri_census c;
    colibri_message message;
    CHECK_OK(colibri_array_census(&empty, &c, &message), message);
    CHECK(c.n_nan == 0 && c.first_nonfinite == -1);
    CHECK_OK(colibri_array_widen(&empty, NULL, &message), message);
}

static void test_integers_are_refused(void)
{
    const int32_t ids[2] = {1, 2};
    colibri_array a = {.data = ids, .dtype = COLIBRI_I32, .n_dims = 1, .shape = {2}, .strides = {4}};
    colibri_census c;
    colibri_message message;
    CHECK(colibri_array_census(&a, &c, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "integers");
}

static void test_the_machine_says_what_it_runs(void)
{
    bool found = false;
    for (size_t i = 0; i < colibri_isa_count(); i++)
        found = found || strcmp(colibri_isa_name(i), colibri_isa()) == 0;
    CHECK(found && colibri_isa_name(colibri_isa_count()) == NULL);
    CHECK(strcmp(colibri_isa_name(colibri_isa_count() - 1), "scalar") == 0);
    CHECK(colibri_usable_cpus().count >= 1 && colibri_usable_cpus().limit != NULL && colibri_version()[0] != '\0');
}

int main(void)
{
    RUN(test_widen_follows_strides_and_dtype);
    RUN(test_census_counts_bits_and_says_where_the_first_is);
    RUN(test_an_empty_array_has_nothing_to_count);
    RUN(test_integers_are_refused);
    RUN(test_the_machine_says_what_it_runs);
    return 0;
}
