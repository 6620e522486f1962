/* tap_digest MODEL...: 64 token ids through each model, and one digest of every tap, for comparing machines.
 *
 * The ids and the cuts are drawn from the path as it is given, so the same everywhere. Each model runs at once on one thread, token by
 * token, and in random passes on 2 and 4 threads; the program fails when these differ by a byte, and prints the first. Every NaN
 * counts as one. The first line names the code path in force. */
#define _DEFAULT_SOURCE
#include "numbers.h"
#include "support/snapshot.h"

enum { N_TOKENS = 64 };

static uint64_t fnv1a(const unsigned char *bytes, int64_t n)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3;
    return hash;
}

static int64_t vocabulary_of(const colibri_model *m)
{
    for (size_t i = 0; i < colibri_model_field_count(m); i++)
        if (strcmp(colibri_model_field(m, i).name, "vocab_size") == 0)
            return colibri_model_field(m, i).integer;
    return 0;
}

/* A fresh session fed in passes of 1 .. `most` tokens. */
static snapshot run(colibri_model *m, const int32_t *ids, int threads, int most)
{
    static const char *const everything[] = {"all", "layers.*.attn.weights"};
    colibri_session_options options = {
        .size = sizeof options, .capture = everything, .n_capture = 2, .max_tokens = N_TOKENS, .threads = threads};
    colibri_session *s;
    colibri_message message;
    CHECK_OK(colibri_session_create(m, &options, &s, &message), message);
    for (int at = 0, n; at < N_TOKENS; at += n) {
        n = most == N_TOKENS ? N_TOKENS : 1 + random_below(most);
        n = n < N_TOKENS - at ? n : N_TOKENS - at;
        CHECK_OK(colibri_session_feed(s, ids + at, n, NULL, NULL, &message), message);
    }
    snapshot taps = snapshot_take(s);
    colibri_session_release(s);
    return taps;
}

static void digest(const char *path)
{
    static const struct {
        int threads, most;
    } others[] = {{1, 1}, {2, 24}, {4, 9}};
    colibri_model *m;
    colibri_message message;
    int32_t ids[N_TOKENS];
    CHECK_OK(colibri_model_open(path, &m, &message), message);
    const int64_t vocabulary = vocabulary_of(m);
    CHECK(vocabulary > 0);
    random_state = fnv1a((const unsigned char *)path, (int64_t)strlen(path));
    for (int i = 0; i < N_TOKENS; i++)
        ids[i] = random_below((int)vocabulary);
    snapshot once = run(m, ids, 1, N_TOKENS);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        snapshot other = run(m, ids, others[i].threads, others[i].most);
        CHECK(snapshot_same(&other, &once, path) == once.n);
        snapshot_free(&other);
    }
    for (int64_t i = 0; i < once.n; i++)
        printf("%s %s %016llx\n", path, once.entries[i].path,
               (unsigned long long)fnv1a(once.entries[i].bytes, once.entries[i].n_bytes));
    snapshot_free(&once);
    colibri_model_release(m);
}

int main(int argc, char **argv)
{
    CHECK(setenv("COLIBRI_CPUS", "16", 1) == 0); /* as many threads as are asked for below */
    printf("%s\n", colibri_isa());
    for (int i = 1; i < argc; i++)
        digest(argv[i]);
    return 0;
}
