#include "capture.h"

#include <stdlib.h>
#include <string.h>

static const char *const level_names[] = {"none", "routing", "moe", "all"}; /* by colibri_level */
#define N_LEVELS (int)(sizeof level_names / sizeof *level_names)

const char *capture_level_name(colibri_level level)
{
    return (int)level < N_LEVELS ? level_names[level] : NULL;
}

/* Does the whole path match the pattern? One '*' at a time is enough to come back to (greedy from the left). */
static bool matches(const char *pattern, const char *path)
{
    const char *star = NULL, *resume = NULL;
    while (*path != '\0') {
        if (*pattern == '*') {
            star = pattern++;
            resume = path;
        } else if (*pattern == *path) {
            pattern++;
            path++;
        } else if (star != NULL) {
            pattern = star + 1;
            path = ++resume;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == '\0';
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && memcmp(text + n - m, end, m) == 0;
}

static bool names_tap(const config *c, const char *pattern, tap t, int64_t layer)
{
    char path[TAP_PATH_SIZE];
    if (tap_kinds[t].level == COLIBRI_LEVEL_NAMED && !ends_with(pattern, strrchr(tap_kinds[t].path, '.') + 1))
        return false;
    int64_t n_experts = tap_kinds[t].scope == COLIBRI_SCOPE_EXPERT ? c->num_experts : 1;
    for (int64_t e = 0; e < n_experts; e++) {
        tap_path(t, layer, e, path);
        if (matches(pattern, path))
            return true;
    }
    return false;
}

/* Letters to insert, delete or change to turn a into b; rows of the usual table, b at most TAP_PATH_SIZE long. */
static int edit_distance(const char *a, const char *b)
{
    int row[TAP_PATH_SIZE + 1];
    int n = (int)strlen(b);
    for (int j = 0; j <= n; j++)
        row[j] = j;
    for (int i = 1; a[i - 1] != '\0'; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            int skip = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = change < skip ? change : skip;
        }
    }
    return row[n];
}

static bool exists_somewhere(const config *c, tap t)
{
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        if (tap_exists(c, t, l))
            return true;
    return false;
}

static colibri_status fail_no_match(const config *c, const char *pattern, colibri_message *message)
{
    char nearest[TAP_PATH_SIZE] = "routing", path[TAP_PATH_SIZE];
    int best = edit_distance(pattern, nearest);
    for (int i = 0; i < N_LEVELS; i++) {
        int distance = edit_distance(pattern, level_names[i]);
        if (distance < best) {
            best = distance;
            strcpy(nearest, level_names[i]);
        }
    }
    for (int t = 0; t < TAP_COUNT; t++)
        for (int64_t l = -1; l < (tap_is_per_layer((tap)t) ? c->num_hidden_layers : 0); l++) {
            if (l >= 0 ? !tap_exists(c, (tap)t, l) : !exists_somewhere(c, (tap)t))
                continue;
            for (int64_t e = -1; e < (tap_kinds[t].scope == COLIBRI_SCOPE_EXPERT ? 1 : 0); e++) {
                tap_path((tap)t, l, e, path);
                int distance = edit_distance(pattern, path);
                if (distance < best) {
                    best = distance;
                    strcpy(nearest, path);
                }
            }
        }
    return fail(
        message, COLIBRI_ERROR_ARGUMENT,
        "capture \"%s\" names no tap of this model; the nearest is \"%s\" (or use \"none\", \"routing\", \"moe\", \"all\")",
        pattern, nearest);
}

static colibri_status add_pattern(const config *c, const char *pattern, bool *kept, colibri_message *message)
{
    int level = 0;
    while (level < N_LEVELS && strcmp(pattern, level_names[level]) != 0)
        level++;

    bool any = level < N_LEVELS;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        for (int t = 0; t < TAP_COUNT; t++) {
            if (!tap_exists(c, (tap)t, l) || (!tap_is_per_layer((tap)t) && l > 0))
                continue;
            bool wanted = level < N_LEVELS ? (int)tap_kinds[t].level <= level : names_tap(c, pattern, (tap)t, l);
            if (wanted) {
                kept[l * TAP_COUNT + tap_storage(c, (tap)t)] = true;
                any = true;
            }
        }
    return any ? COLIBRI_OK : fail_no_match(c, pattern, message);
}

colibri_status capture_resolve(const config *c, const char *const *patterns, size_t n_patterns, bool *kept,
                               colibri_message *message)
{
    TRY(add_pattern(c, "none", kept, message)); /* what every capture keeps: the KV cache */
    for (size_t i = 0; i < n_patterns; i++) {
        if (patterns[i] == NULL)
            return fail(message, COLIBRI_ERROR_ARGUMENT, "capture pattern %zu is NULL", i);
        TRY(add_pattern(c, patterns[i], kept, message));
    }
    /* Packed rows cannot be told apart without their tokens and offsets. */
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        for (int t = TAP_DISPATCH_TOKENS; t <= TAP_DISPATCH_OUTPUT; t++)
            if (kept[l * TAP_COUNT + t])
                kept[l * TAP_COUNT + TAP_DISPATCH_TOKENS] = kept[l * TAP_COUNT + TAP_DISPATCH_OFFSETS] = true;
    return COLIBRI_OK;
}
