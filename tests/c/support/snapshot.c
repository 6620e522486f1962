#include "snapshot.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../check.h"
#include "core/session.h"
#include "api/handles.h"

static void make_nan_plain(unsigned char *bytes, int64_t n)
{
    const uint32_t plain = 0x7FC00000;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, bytes + 4 * i, 4);
        if ((bits & 0x7FFFFFFF) > 0x7F800000)
            memcpy(bytes + 4 * i, &plain, 4);
    }
}

/* Appends the array's elements, row-major. */
static void append(snapshot_entry *e, const colibri_array *a)
{
    int64_t size = (int64_t)colibri_dtype_size(a->dtype), n = 1, index[COLIBRI_MAX_DIMS] = {0};
    for (int i = 0; i < a->n_dims; i++)
        n *= a->shape[i];
    e->bytes = realloc(e->bytes, (size_t)(e->n_bytes + n * size + 1));
    CHECK(e->bytes != NULL);
    unsigned char *out = e->bytes + e->n_bytes;
    for (int64_t j = 0; j < n; j++) {
        const unsigned char *from = a->data;
        for (int i = 0; i < a->n_dims; i++)
            from += index[i] * a->strides[i];
        memcpy(out + j * size, from, (size_t)size);
        for (int i = a->n_dims - 1; i >= 0 && ++index[i] == a->shape[i]; i--)
            index[i] = 0;
    }
    if (a->dtype == COLIBRI_F32)
        make_nan_plain(out, n);
    e->n_bytes += n * size;
}

static snapshot_entry *new_entry(snapshot *out)
{
    out->entries = realloc(out->entries, (size_t)(out->n + 1) * sizeof *out->entries);
    CHECK(out->entries != NULL);
    snapshot_entry *e = &out->entries[out->n++];
    *e = (snapshot_entry){.n_bytes = 0};
    return e;
}

static void take_tap(snapshot *out, colibri_session *s, tap t, int64_t layer, int64_t expert)
{
    colibri_message message;
    bool joined = tap_kinds[t].scope == COLIBRI_SCOPE_EXPERT;
    snapshot_entry *e = new_entry(out);
    tap_path(t, layer, expert, e->path);
    for (int64_t pass = joined ? 0 : -1; pass < (joined ? colibri_session_pass_count(s) : 0); pass++) {
        colibri_array a;
        colibri_lease *lease;
        CHECK_OK(colibri_session_tap(s, t, layer, expert, pass, &a, &lease, &message), message);
        append(e, &a);
        colibri_lease_release(lease);
    }
}

snapshot snapshot_take(colibri_session *s)
{
    const config *c = &s->inner->model->config;
    snapshot out = {0};
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        for (int t = 0; t < TAP_COUNT; t++) {
            bool packed = tap_rows_of((tap)t) == ROWS_PACKED || tap_rows_of((tap)t) == ROWS_PASSES;
            if (packed || (!tap_is_per_layer((tap)t) && l > 0) || !colibri_session_captures(s, (size_t)t, l))
                continue;
            for (int64_t e = 0; e < (tap_kinds[t].scope == COLIBRI_SCOPE_EXPERT ? c->num_experts : 1); e++)
                take_tap(&out, s, (tap)t, l, e);
        }
    colibri_array a;
    colibri_lease *lease;
    colibri_message message;
    CHECK_OK(colibri_session_logits(s, &a, &lease, &message), message);
    snapshot_entry *e = new_entry(&out);
    strcpy(e->path, "last_logits");
    append(e, &a);
    colibri_lease_release(lease);
    return out;
}

void snapshot_free(snapshot *s)
{
    for (int64_t i = 0; i < s->n; i++)
        free(s->entries[i].bytes);
    free(s->entries);
    *s = (snapshot){0};
}

const snapshot_entry *snapshot_find(const snapshot *s, const char *path)
{
    for (int64_t i = 0; i < s->n; i++)
        if (strcmp(s->entries[i].path, path) == 0)
            return &s->entries[i];
    return NULL;
}

int64_t snapshot_nonfinite(const snapshot *s, const char *path)
{
    const snapshot_entry *e = snapshot_find(s, path);
    int64_t n = 0;
    CHECK(e != NULL);
    for (int64_t i = 0; i < e->n_bytes; i += 4) {
        uint32_t bits;
        memcpy(&bits, e->bytes + i, 4);
        n += (bits & 0x7F800000) == 0x7F800000;
    }
    return n;
}

int64_t snapshot_same(const snapshot *part, const snapshot *whole, const char *what)
{
    for (int64_t i = 0; i < part->n; i++) {
        const snapshot_entry *a = &part->entries[i], *b = snapshot_find(whole, a->path);
        if (b == NULL || a->n_bytes != b->n_bytes || memcmp(a->bytes, b->bytes, (size_t)a->n_bytes) != 0) {
            fprintf(stderr, "%s: %s differs (%lld and %lld bytes)\n", what, a->path, (long long)a->n_bytes,
                    b ? (long long)b->n_bytes : -1);
            exit(1);
        }
    }
    return part->n;
}
