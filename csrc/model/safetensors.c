#include "safetensors.h"

#include "foreign.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    int bits;
} dtypes[] = {
    {"F32", 32},        {"BF16", 16},   {"F16", 16},    {"F64", 64},    {"C64", 64},    {"I64", 64},
    {"U64", 64},        {"I32", 32},    {"U32", 32},    {"I16", 16},    {"U16", 16},    {"I8", 8},
    {"U8", 8},          {"BOOL", 8},    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
};

char *shape_show(const int64_t *shape, int n_dims, char *buffer, size_t n_bytes)
{
    size_t n = (size_t)snprintf(buffer, n_bytes, "[");
    for (int i = 0; i < n_dims && n < n_bytes; i++)
        n += (size_t)snprintf(buffer + n, n_bytes - n, "%s%lld", i == 0 ? "" : ", ", (long long)shape[i]);
    if (n < n_bytes)
        snprintf(buffer + n, n_bytes - n, "]");
    return buffer;
}

typedef struct reader {
    const mapfile *file;
    int64_t data_start;
    colibri_message *message;
} reader;

static colibri_status refuse(const reader *r, const char *name, const char *what)
{
    return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: tensor \"%.200s\": %s", r->file->path, name, what);
}

/* Bytes of n_dims elements by checked multiplication; < 0 when the product leaves int64. */
static int64_t byte_count(const tensor *t, int bits)
{
    int64_t count = 1;
    bool empty = false;
    for (int i = 0; i < t->n_dims; i++) { /* a 0 must not hide an overflow beside it */
        if (t->shape[i] == 0)
            empty = true;
        else if (count > INT64_MAX / bits / t->shape[i])
            return -1;
        else
            count *= t->shape[i];
    }
    return empty ? 0 : count * bits % 8 != 0 ? -1 : count * bits / 8;
}

static colibri_status read_shape(const reader *r, const json_node *node, tensor *t)
{
    if (node == NULL || node->kind != JSON_ARRAY)
        return refuse(r, t->name, "\"shape\" must be a list of integers");
    if (node->as.count > SAFETENSORS_MAX_DIMS)
        return refuse(r, t->name, "more than 8 dimensions");
    for (const json_node *dim = json_first(node); dim != NULL; dim = json_next(node, dim)) {
        if (dim->kind != JSON_INTEGER || dim->as.integer < 0)
            return refuse(r, t->name, "\"shape\" must hold integers from 0 to 2^63 - 1");
        t->shape[t->n_dims++] = dim->as.integer;
    }
    return COLIBRI_OK;
}

static colibri_status read_entry(const reader *r, const json_node *entry, tensor *t)
{
    *t = (tensor){.name = entry->key};
    if (entry->kind != JSON_OBJECT)
        return refuse(r, t->name, "its entry in the header must be an object with dtype, shape and data_offsets");
    const json_node *dtype = json_member(entry, "dtype"), *offsets = json_member(entry, "data_offsets");
    if (dtype == NULL || dtype->kind != JSON_STRING)
        return refuse(r, t->name, "\"dtype\" must be a string");
    int bits = 0;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strcmp(dtypes[i].name, dtype->as.text) == 0) {
            t->dtype = dtypes[i].name;
            bits = dtypes[i].bits;
        }
    }
    if (bits == 0)
        return fail(r->message, COLIBRI_ERROR_FORMAT,
                    "%s: tensor \"%.200s\": \"%.40s\" is not a safetensors dtype (F32, BF16, F16 ...)", r->file->path, t->name,
                    dtype->as.text);
    TRY(read_shape(r, json_member(entry, "shape"), t));

    const json_node *begin = json_first(offsets);
    if (offsets == NULL || offsets->kind != JSON_ARRAY || offsets->as.count != 2 || begin->kind != JSON_INTEGER ||
        begin[1].kind != JSON_INTEGER)
        return refuse(r, t->name, "\"data_offsets\" must be two integers");
    int64_t first = begin->as.integer, last = begin[1].as.integer;
    if (first < 0 || last < first)
        return refuse(r, t->name, "\"data_offsets\" must be two integers in ascending order");
    char shape[200];
    int64_t wanted = byte_count(t, bits);
    shape_show(t->shape, t->n_dims, shape, sizeof shape);
    if (wanted < 0)
        return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: tensor \"%.200s\": shape %s of %s overflows or ends inside a byte",
                    r->file->path, t->name, shape, t->dtype);
    if (last - first != wanted)
        return fail(r->message, COLIBRI_ERROR_FORMAT,
                    "%s: tensor \"%.200s\": shape %s of %s needs %lld bytes, its data_offsets hold %lld", r->file->path, t->name,
                    shape, t->dtype, (long long)wanted, (long long)(last - first));
    t->n_bytes = wanted;
    t->file_offset = first; /* of the data for now: place_tensors turns it into an offset of the file */
    return COLIBRI_OK;
}

static colibri_status check_metadata(const reader *r, const json_node *metadata)
{
    if (metadata->kind == JSON_NULL)
        return COLIBRI_OK;
    if (metadata->kind != JSON_OBJECT)
        return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: __metadata__ must be an object of strings, not %s", r->file->path,
                    json_kind_name(metadata->kind));
    for (const json_node *value = json_first(metadata); value != NULL; value = json_next(metadata, value))
        if (value->kind != JSON_STRING)
            return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: __metadata__ \"%.200s\" must be a string, not %s", r->file->path,
                        value->key, json_kind_name(value->kind));
    return COLIBRI_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    const tensor *x = a, *y = b;
    if (x->file_offset != y->file_offset)
        return x->file_offset < y->file_offset ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

/* Sorted by offset, the tensors must follow each other without gap or overlap from the first data byte to the last. */
static colibri_status place_tensors(const reader *r, safetensors *s)
{
    const mapfile *file = r->file;
    int64_t n_data = file->n_bytes - r->data_start, at = 0;
    if (s->n_tensors > 0)
        qsort(s->tensors, (size_t)s->n_tensors, sizeof *s->tensors, compare_offsets);
    for (int64_t i = 0; i < s->n_tensors; i++) {
        tensor *t = &s->tensors[i];
        const char *before = i == 0 ? "the start of the data" : t[-1].name;
        if (t->file_offset < at)
            return fail(r->message, COLIBRI_ERROR_FORMAT,
                        "%s: tensors \"%.200s\" and \"%.200s\" claim the same bytes (the second begins at %lld, "
                        "the first ends at %lld)",
                        file->path, before, t->name, (long long)t->file_offset, (long long)at);
        if (t->file_offset > at)
            return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: a hole of %lld bytes between \"%.200s\" and \"%.200s\"",
                        file->path, (long long)(t->file_offset - at), before, t->name);
        if (t->n_bytes > n_data - at)
            return fail(r->message, COLIBRI_ERROR_FORMAT,
                        "%s: tensor \"%.200s\" ends %lld bytes behind the end of the file; the file is cut short", file->path,
                        t->name, (long long)(t->n_bytes - (n_data - at)));
        at += t->n_bytes;
        t->file_offset += r->data_start;
        t->data = file->data + t->file_offset;
    }
    if (at != n_data)
        return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: %lld bytes after the last tensor belong to none", file->path,
                    (long long)(n_data - at));
    return COLIBRI_OK;
}

static colibri_status read_tensors(const reader *r, safetensors *s)
{
    const json_node *root = s->header.nodes;
    if (root->as.count > 0) {
        s->tensors = malloc((size_t)root->as.count * sizeof *s->tensors);
        if (s->tensors == NULL)
            return fail(r->message, COLIBRI_ERROR_MEMORY, "%s: no memory for a table of %lld tensors", r->file->path,
                        (long long)root->as.count);
    }
    for (const json_node *entry = json_first(root); entry != NULL; entry = json_next(root, entry)) {
        if (strcmp(entry->key, "__metadata__") == 0)
            TRY(check_metadata(r, entry));
        else
            TRY(read_entry(r, entry, &s->tensors[s->n_tensors++]));
    }
    return place_tensors(r, s);
}

/* The length of the header, or a refusal that says what the file is instead. */
static colibri_status header_length(const mapfile *file, int64_t *length, colibri_message *message)
{
    const char *kind = foreign_kind(file->data, file->n_bytes);
    if (kind != NULL)
        return fail(message, COLIBRI_ERROR_FORMAT, "%s is %s", file->path, kind);
    if (file->n_bytes < 8)
        return fail(message, COLIBRI_ERROR_FORMAT,
                    "%s has only %lld bytes; a safetensors file begins with 8 bytes of header length", file->path,
                    (long long)file->n_bytes);
    uint64_t claimed = 0;
    for (int i = 7; i >= 0; i--)
        claimed = claimed << 8 | file->data[i];
    if (claimed == 0)
        return fail(message, COLIBRI_ERROR_FORMAT, "%s: the header has length 0, so there is no JSON in it", file->path);
    if (claimed > COLIBRI_MAX_HEADER_BYTES)
        return fail(message, COLIBRI_ERROR_FORMAT,
                    "%s: a header of %llu bytes is too large (at most %d); this is no safetensors file", file->path,
                    (unsigned long long)claimed, COLIBRI_MAX_HEADER_BYTES);
    if ((int64_t)claimed > file->n_bytes - 8)
        return fail(message, COLIBRI_ERROR_FORMAT, "%s: the header claims %llu bytes, only %lld follow; the file is cut short",
                    file->path, (unsigned long long)claimed, (long long)(file->n_bytes - 8));
    if (file->data[8] != '{')
        return fail(message, COLIBRI_ERROR_FORMAT, "%s: the header must begin with '{' (the format allows spaces only behind it)",
                    file->path);
    *length = (int64_t)claimed;
    return COLIBRI_OK;
}

colibri_status safetensors_read(const mapfile *file, safetensors *out, colibri_message *message)
{
    memset(out, 0, sizeof *out);
    int64_t length = 0;
    TRY(header_length(file, &length, message));
    TRY(json_parse((const char *)file->data + 8, (size_t)length, file->path, &out->header, message));
    reader r = {file, 8 + length, message};
    colibri_status status = read_tensors(&r, out);
    free(out->header.nodes); /* the names stay */
    out->header.nodes = NULL;
    if (status != COLIBRI_OK)
        safetensors_free(out);
    return status;
}

void safetensors_free(safetensors *s)
{
    free(s->tensors);
    json_free(&s->header);
    memset(s, 0, sizeof *s);
}
