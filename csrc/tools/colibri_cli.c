/* colibri_cli MODEL --ids 1,2,3 [--threads N] [--generate N] [--profile], or --help
 *
 * Runs token ids through a model and prints, for every MoE layer and token, the chosen experts with their gates, then the largest
 * logits of the last token. --generate appends the most likely token N times, --profile tells what each stage took. Uses the
 * public headers only. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "colibri.h"
#include "profile.h"

#define TOP_LOGITS 5

typedef struct arguments {
    const char *model;
    int32_t *ids;
    int64_t n_ids;
    int threads;
    int64_t generate;
    bool profile;
} arguments;

static const char usage_line[] = "usage: colibri_cli MODEL --ids 1,2,3 [--threads N] [--generate N] [--profile]\n";
static const char help_text[] =
    "\nRuns token ids through a model and prints, for every MoE layer and token, the chosen experts with their gates,\n"
    "then the largest logits of the last token.\n\n"
    "  MODEL         a checkpoint: its folder, or a .safetensors file beside its config.json\n"
    "  --ids LIST    token ids, separated by commas\n"
    "  --threads N   threads to use; 0, the default: as many as this process may have\n"
    "  --generate N  append the most likely token N times\n"
    "  --profile     print what each stage of each layer took: time, cycles, operations, bytes\n"
    "  -h, --help    print this and end\n";

static int usage(const char *complaint, const char *what)
{
    fprintf(stderr, "colibri_cli: %s%s\n%s", complaint, what, usage_line);
    return 1;
}

/* ---- command line ---------------------------------------------------------------------------------------------------------- */

static bool read_number(const char *text, const char **end, int64_t most, int64_t *out)
{
    char *stop;
    errno = 0;
    long long value = strtoll(text, &stop, 10);
    *end = stop;
    *out = value;
    return stop != text && errno == 0 && value >= 0 && value <= most;
}

static bool read_ids(const char *text, arguments *a)
{
    size_t n = 1;
    for (const char *p = text; *p != '\0'; p++)
        n += *p == ',';
    free(a->ids);
    a->ids = malloc(n * sizeof *a->ids);
    a->n_ids = 0;
    for (int64_t id; a->ids != NULL && read_number(text, &text, INT32_MAX, &id); text++) {
        a->ids[a->n_ids++] = (int32_t)id;
        if (*text == '\0')
            return true;
        if (*text != ',')
            return false;
    }
    return false;
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0)
            return true;
    return false;
}

static int read_arguments(int argc, char **argv, arguments *a)
{
    for (int i = 1; i < argc; i++) {
        const char *end = "";
        int64_t number = 0;
        if (argv[i][0] != '-') {
            if (a->model != NULL)
                return usage("one model at a time, not also ", argv[i]);
            a->model = argv[i];
            continue;
        }
        if (strcmp(argv[i], "--profile") == 0) {
            a->profile = true;
            continue;
        }
        if (i + 1 == argc)
            return usage("a value is missing after ", argv[i]);
        if (strcmp(argv[i], "--ids") == 0) {
            if (!read_ids(argv[i + 1], a))
                return usage("--ids takes token ids such as 1,2,3, not ", argv[i + 1]);
        } else if (strcmp(argv[i], "--threads") == 0 || strcmp(argv[i], "--generate") == 0) {
            if (!read_number(argv[i + 1], &end, INT32_MAX, &number) || *end != '\0')
                return usage("a whole number is needed, not ", argv[i + 1]);
            if (argv[i][2] == 't')
                a->threads = (int)number;
            else
                a->generate = number;
        } else {
            return usage("unknown option ", argv[i]);
        }
        i++;
    }
    if (a->model == NULL)
        return usage("which model?", "");
    return a->n_ids == 0 ? usage("which token ids? ", "--ids is missing") : 0;
}

/* ---- what was computed ----------------------------------------------------------------------------------------------------- */

static size_t find_tap(const char *path)
{
    size_t count, kind = 0;
    const colibri_tap_kind *kinds = colibri_tap_kinds(&count);
    while (kind < count && strcmp(kinds[kind].path, path) != 0)
        kind++;
    return kind;
}

static colibri_status print_layer(colibri_session *s, int64_t layer, const int32_t *tokens, int64_t first,
                                  colibri_message *message)
{
    colibri_array ids, gates;
    colibri_lease *ids_lease = NULL, *gates_lease = NULL;
    int64_t pass = colibri_session_pass_count(s) - 1;
    colibri_status status =
        colibri_session_tap(s, find_tap("layers.{l}.moe.expert_ids"), layer, 0, pass, &ids, &ids_lease, message);
    if (status == COLIBRI_OK)
        status = colibri_session_tap(s, find_tap("layers.{l}.moe.gates"), layer, 0, pass, &gates, &gates_lease, message);
    if (status == COLIBRI_OK) {
        const int32_t *id = ids.data;
        const float *gate = gates.data;
        printf("layer %lld\n", (long long)layer);
        for (int64_t t = 0; t < ids.shape[0]; t++) {
            printf("  token %lld (id %ld):", (long long)(first + t), (long)tokens[t]);
            for (int64_t k = 0; k < ids.shape[1]; k++)
                printf("  %ld %.6g", (long)*id++, (double)*gate++);
            printf("\n");
        }
    }
    colibri_lease_release(ids_lease);
    colibri_lease_release(gates_lease);
    return status;
}

/* Prints the largest logits, ties to the lower id; *best is the first, or -1 when NaN or infinity leaves none to choose. */
static colibri_status print_logits(colibri_session *s, int32_t *best, colibri_message *message)
{
    colibri_array logits;
    colibri_lease *lease;
    colibri_status status = colibri_session_logits(s, &logits, &lease, message);
    if (status != COLIBRI_OK)
        return status;
    const float *value = logits.data;
    int64_t top[TOP_LOGITS], n = 0;
    for (int64_t i = 0; i < logits.shape[0]; i++) {
        int64_t place = n < TOP_LOGITS ? n++ : TOP_LOGITS;
        while (place > 0 && value[i] > value[top[place - 1]]) {
            if (place < TOP_LOGITS)
                top[place] = top[place - 1];
            place--;
        }
        if (place < TOP_LOGITS)
            top[place] = i;
    }
    printf("logits:");
    for (int64_t i = 0; i < n; i++)
        printf("  %lld %.6g", (long long)top[i], (double)value[top[i]]);
    printf("\n");
    colibri_census counts;
    status = colibri_array_census(&logits, &counts, message);
    bool chosen = status == COLIBRI_OK && counts.n_nan == 0 && isfinite(value[top[0]]);
    *best = chosen ? (int32_t)top[0] : -1;
    colibri_lease_release(lease);
    return status;
}

static colibri_status run_pass(colibri_model *m, colibri_session *s, profile *p, const int32_t *ids, int64_t n, int32_t *next,
                               colibri_message *message)
{
    int64_t first = colibri_session_length(s), n_layers = 0;
    colibri_status status = colibri_session_feed(s, ids, n, NULL, NULL, message);
    if (status == COLIBRI_OK && p != NULL)
        status = profile_pass(p, s, message);
    for (size_t i = 0; i < colibri_model_field_count(m); i++)
        if (strcmp(colibri_model_field(m, i).name, "num_hidden_layers") == 0)
            n_layers = colibri_model_field(m, i).integer;
    for (int64_t l = 0; l < n_layers && status == COLIBRI_OK; l++)
        if (colibri_model_layer(m, l).is_moe)
            status = print_layer(s, l, ids, first, message);
    return status == COLIBRI_OK ? print_logits(s, next, message) : status;
}

static colibri_status run(const arguments *a, colibri_message *message)
{
    colibri_model *m = NULL;
    colibri_session *s = NULL;
    profile *p = NULL;
    colibri_session_options options = {.size = sizeof options, .threads = a->threads, .max_tokens = a->n_ids + a->generate};
    int32_t next;
    colibri_status status = colibri_model_open(a->model, &m, message);
    if (status == COLIBRI_OK && a->profile && (p = profile_create(m)) == NULL) {
        snprintf(message->text, sizeof message->text, "no memory for a profile");
        status = COLIBRI_ERROR_MEMORY;
    }
    if (status == COLIBRI_OK)
        status = colibri_session_create(m, &options, &s, message);
    if (status == COLIBRI_OK && p != NULL)
        status = profile_watch(p, s, message);
    if (status == COLIBRI_OK)
        status = run_pass(m, s, p, a->ids, a->n_ids, &next, message);
    for (int64_t i = 0; i < a->generate && status == COLIBRI_OK; i++) {
        int32_t id = next;
        if (id < 0) {
            snprintf(message->text, sizeof message->text, "the logits hold NaN or infinity, so no token can be chosen");
            status = COLIBRI_ERROR_ARGUMENT;
            break;
        }
        printf("token %lld: %ld\n", (long long)(a->n_ids + i), (long)id);
        if (i + 1 < a->generate)
            status = run_pass(m, s, p, &id, 1, &next, message);
    }
    if (status == COLIBRI_OK && p != NULL)
        profile_print(p);
    colibri_session_release(s);
    profile_free(p);
    colibri_model_release(m);
    return status;
}

int main(int argc, char **argv)
{
    arguments a = {0};
    colibri_message message;
    int failed = 0;
    if (wants_help(argc, argv))
        printf("%s%s", usage_line, help_text);
    else if ((failed = read_arguments(argc, argv, &a)) == 0 && run(&a, &message) != COLIBRI_OK) {
        fprintf(stderr, "colibri_cli: %s\n", message.text);
        failed = 1;
    }
    free(a.ids);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "colibri_cli: the output cannot be written\n");
        failed = 1;
    }
    return failed;
}
