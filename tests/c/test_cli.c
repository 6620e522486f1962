/* The command line: what it prints for a model, and how it refuses. The environment variable COLIBRI_CLI names the program. */
#include <sys/wait.h>

#include "check.h"
#include "support/tiny_model.h"

typedef struct outcome {
    int status;
    char text[16384]; /* both streams */
} outcome;

static outcome run(const char *arguments)
{
    outcome out = {0};
    char command[1024];
    const char *program = getenv("COLIBRI_CLI");
    CHECK(program != NULL);
    snprintf(command, sizeof command, "'%s' %s 2>&1", program, arguments);
    FILE *pipe = popen(command, "r");
    CHECK(pipe != NULL);
    size_t n = fread(out.text, 1, sizeof out.text - 1, pipe);
    out.text[n] = '\0';
    int status = pclose(pipe);
    CHECK(WIFEXITED(status));
    out.status = WEXITSTATUS(status);
    return out;
}

/* Writes the checkpoint, runs the command line on it with `options`, removes it. */
static outcome run_on(tiny_checkpoint t, const char *options)
{
    char arguments[512];
    tiny_checkpoint_write(&t);
    snprintf(arguments, sizeof arguments, "'%s' %s", t.folder, options);
    outcome out = run(arguments);
    tiny_checkpoint_remove(&t);
    return out;
}

static int count(const char *text, const char *piece)
{
    int n = 0;
    for (const char *at = strstr(text, piece); at != NULL; at = strstr(at + 1, piece))
        n++;
    return n;
}

static void test_it_prints_experts_and_gates_of_every_moe_layer_and_the_largest_logits(void)
{
    outcome out = run_on(tiny_qwen2_moe(), "--ids 1,2,3 --threads 2 --generate 4");
    CHECK(out.status == 0);
    CHECK(count(out.text, "layer 0\n") == 4 && count(out.text, "layer 1\n") == 0 && count(out.text, "layer 2\n") == 4);
    CHECK(count(out.text, "(id 3):") >= 2 && count(out.text, "logits:") == 4);
    for (int i = 3; i < 7; i++) {
        char line[32];
        snprintf(line, sizeof line, "\ntoken %d: ", i);
        CHECK(count(out.text, line) == 1);
    }
}

static void test_a_profile_has_a_row_for_each_stage_of_each_layer(void)
{
    const char *const stages[] = {"embed", "attention", "router", "dispatcher", "expert", "shared", "aggregator", "mlp", "residual"};
    const int rows[] = {1, 3, 2, 2, 2, 2, 2, 1, 3}; /* of three layers, of which the second is dense */
    outcome plain = run_on(tiny_qwen2_moe(), "--ids 1,2,3"), out = run_on(tiny_qwen2_moe(), "--profile --ids 1,2,3 --generate 3");
    CHECK(out.status == 0 && strncmp(out.text, plain.text, strlen(plain.text)) == 0);
    CHECK(count(out.text, "profile of prefill, tokens: 3\n") == 1 && count(out.text, "profile of decode, tokens: 2\n") == 1);
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        char cell[32];
        snprintf(cell, sizeof cell, "  %-12s ", stages[i]);
        CHECK(count(out.text, cell) == 2 * (rows[i] + 1)); /* in both phases, and the sum of the layers */
    }
    CHECK(count(out.text, "\ncycles: ") == 1);
    outcome prefill = run_on(tiny_qwen2_moe(), "--ids 1 --profile");
    CHECK(count(prefill.text, "profile of decode") == 0);
}

static void test_help_goes_to_standard_output_and_is_no_error(void)
{
    const char *const asked[] = {"--help", "-h", "model --ids 1 --help"};
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "%s 2>/dev/null", asked[i]);
        outcome out = run(arguments);
        CHECK(out.status == 0 && strncmp(out.text, "usage: colibri_cli MODEL", 24) == 0);
        CHECK(strstr(out.text, "--generate N ") != NULL && strstr(out.text, "--threads N ") != NULL);
    }
}

static void test_a_wrong_path_is_named_and_the_program_ends_with_1(void)
{
    outcome out = run("/nowhere/at-all --ids 1,2");
    CHECK(out.status == 1 && strstr(out.text, "/nowhere/at-all") != NULL);
}

static void test_wrong_arguments_are_named_and_the_usage_is_shown(void)
{
    const struct {
        const char *arguments, *named;
    } wrong[] = {
        {"", "which model?"},
        {"model", "--ids"},
        {"model --ids 1,x", "1,x"},
        {"model --ids 1,,2", "1,,2"},
        {"model --ids -1", "-1"},
        {"model --ids 99999999999", "99999999999"},
        {"model --ids 1 --threads two", "two"},
        {"model --ids 1 --colour", "--colour"},
        {"model other --ids 1", "other"},
        {"model --ids", "--ids"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        outcome out = run(wrong[i].arguments);
        CHECK(out.status == 1 && strstr(out.text, wrong[i].named) != NULL && strstr(out.text, "usage:") != NULL);
    }
}

static void test_an_id_outside_the_vocabulary_is_refused(void)
{
    outcome out = run_on(tiny_mixtral(), "--ids 1,50");
    CHECK(out.status == 1 && strstr(out.text, "token id 50 at index 1") != NULL);
}

static void test_output_that_cannot_be_written_is_a_failure(void)
{
    outcome out = run_on(tiny_mixtral(), "--ids 1 > /dev/full");
    CHECK(out.status == 1);
}

int main(void)
{
    RUN(test_it_prints_experts_and_gates_of_every_moe_layer_and_the_largest_logits);
    RUN(test_a_profile_has_a_row_for_each_stage_of_each_layer);
    RUN(test_help_goes_to_standard_output_and_is_no_error);
    RUN(test_a_wrong_path_is_named_and_the_program_ends_with_1);
    RUN(test_wrong_arguments_are_named_and_the_usage_is_shown);
    RUN(test_an_id_outside_the_vocabulary_is_refused);
    RUN(test_output_that_cannot_be_written_is_a_failure);
    return 0;
}
