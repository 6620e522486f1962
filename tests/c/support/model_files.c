#include "model_files.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void stop(const char *what)
{
    perror(what);
    exit(1);
}

folder folder_make(void)
{
    const char *base = getenv("TMPDIR");
    folder f;
    snprintf(f.path, sizeof f.path, "%s/colibri-test-XXXXXX", base != NULL && strlen(base) < 64 ? base : "/tmp");
    if (mkdtemp(f.path) == NULL)
        stop(f.path);
    return f;
}

char *folder_file(const folder *f, const char *name)
{
    static char buffers[4][512];
    static int turn;
    char *path = buffers[turn++ % 4];
    snprintf(path, sizeof buffers[0], "%s/%s", f->path, name);
    return path;
}

void folder_remove(const folder *f)
{
    DIR *listing = opendir(f->path);
    if (listing == NULL)
        return;
    for (struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            remove(folder_file(f, entry->d_name));
    closedir(listing);
    rmdir(f->path);
}

void file_write(const char *path, const void *data, size_t n_bytes)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, n_bytes, file) != n_bytes || fclose(file) != 0)
        stop(path);
}

void file_write_text(const char *path, const char *text)
{
    file_write(path, text, strlen(text));
}

void raw_safetensors_write(const char *path, const char *header, int64_t claimed, const void *data, size_t n_bytes)
{
    uint64_t length = claimed == -1 ? strlen(header) : (uint64_t)claimed;
    unsigned char prefix[8];
    for (int i = 0; i < 8; i++)
        prefix[i] = (unsigned char)(length >> 8 * i);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(prefix, 1, 8, file) != 8 || fwrite(header, 1, strlen(header), file) != strlen(header) ||
        (n_bytes > 0 && fwrite(data, 1, n_bytes, file) != n_bytes) || fclose(file) != 0)
        stop(path);
}

shelf_tensor *shelf_add(shelf *s, const char *name, int64_t d0, int64_t d1, int64_t d2, float first)
{
    if (s->n_tensors == s->capacity) {
        s->capacity = s->capacity * 2 + 16;
        s->tensors = realloc(s->tensors, (size_t)s->capacity * sizeof *s->tensors);
        if (s->tensors == NULL)
            stop("realloc");
    }
    shelf_tensor *t = &s->tensors[s->n_tensors++];
    *t = (shelf_tensor){.dtype = "F32",
                        .n_dims = d0 == 0   ? 0
                                  : d1 == 0 ? 1
                                  : d2 == 0 ? 2
                                            : 3,
                        .shape = {d0, d1, d2, 0},
                        .first = first};
    snprintf(t->name, sizeof t->name, "%s", name);
    return t;
}

shelf_tensor *shelf_find(shelf *s, const char *name)
{
    for (int i = 0; i < s->n_tensors; i++)
        if (strcmp(s->tensors[i].name, name) == 0)
            return &s->tensors[i];
    fprintf(stderr, "no tensor %s on the shelf\n", name);
    exit(1);
}

void shelf_drop(shelf *s, const char *name)
{
    shelf_tensor *t = shelf_find(s, name);
    *t = s->tensors[--s->n_tensors];
}

static int64_t element_count(const shelf_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->n_dims; i++)
        n *= t->shape[i];
    return n;
}

static int64_t element_size(const shelf_tensor *t)
{
    return strcmp(t->dtype, "F32") == 0 ? 4 : strcmp(t->dtype, "F64") == 0 ? 8 : t->dtype[1] == '8' || t->dtype[1] == '3' ? 1 : 2;
}

void shelf_write_some(const shelf *s, const char *path, int first, int last)
{
    size_t room = (size_t)(last - first) * 400 + 64, n = 0;
    int64_t at = 0;
    char *header = malloc(room);
    if (header == NULL)
        stop("malloc");
    n += (size_t)snprintf(header, room, "{");
    for (int i = first; i < last; i++) {
        const shelf_tensor *t = &s->tensors[i];
        int64_t n_bytes = element_count(t) * element_size(t);
        n += (size_t)snprintf(header + n, room - n, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i == first ? "" : ",", t->name,
                              t->dtype);
        for (int d = 0; d < t->n_dims; d++)
            n += (size_t)snprintf(header + n, room - n, "%s%lld", d == 0 ? "" : ",", (long long)t->shape[d]);
        n += (size_t)snprintf(header + n, room - n, "],\"data_offsets\":[%lld,%lld]}", (long long)at, (long long)(at + n_bytes));
        at += n_bytes;
    }
    snprintf(header + n, room - n, "}");
    unsigned char *data = calloc(1, (size_t)at + 1), *out = data;
    if (data == NULL)
        stop("calloc");
    for (int i = first; i < last; i++) {
        const shelf_tensor *t = &s->tensors[i];
        for (int64_t e = 0; e < element_count(t) && strcmp(t->dtype, "F32") == 0; e++) {
            float value = t->first + (float)e;
            memcpy(out + e * 4, &value, 4);
        }
        out += element_count(t) * element_size(t);
    }
    raw_safetensors_write(path, header, -1, data, (size_t)at);
    free(header);
    free(data);
}

void shelf_write(const shelf *s, const char *path)
{
    shelf_write_some(s, path, 0, s->n_tensors);
}

void shelf_free(shelf *s)
{
    free(s->tensors);
    *s = (shelf){NULL, 0, 0};
}

const char mixtral_config[] =
    "{\"model_type\":\"mixtral\",\"vocab_size\":11,\"hidden_size\":8,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":1,\"intermediate_size\":6,\"num_local_experts\":4,\"num_experts_per_tok\":2,\"rope_theta\":10000.0}";

shelf mixtral_shelf(int experts)
{
    shelf s = {NULL, 0, 0};
    char name[160];
    shelf_add(&s, "model.embed_tokens.weight", 11, 8, 0, 0);
    shelf_add(&s, "model.norm.weight", 8, 0, 0, 0);
    shelf_add(&s, "lm_head.weight", 11, 8, 0, 0);
    for (int l = 0; l < 2; l++) {
        static const char *const names[] = {"self_attn.q_proj",     "self_attn.k_proj", "self_attn.v_proj",
                                            "self_attn.o_proj",     "input_layernorm",  "post_attention_layernorm",
                                            "block_sparse_moe.gate"};
        const int64_t shapes[][2] = {{8, 8}, {4, 8}, {4, 8}, {8, 8}, {8, 0}, {8, 0}, {experts, 8}};
        for (int i = 0; i < 7; i++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, names[i]);
            shelf_add(&s, name, shapes[i][0], shapes[i][1], 0, 0);
        }
        for (int e = 0; e < experts; e++) {
            for (int w = 1; w <= 3; w++) {
                snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%d.w%d.weight", l, e, w);
                shelf_add(&s, name, w == 2 ? 8 : 6, w == 2 ? 6 : 8, 0, (float)(10000 * l + 1000 * e + 100 * w));
            }
        }
    }
    return s;
}

const char *config_with(const char *config, const char *extra)
{
    static char buffers[4][4096];
    static int turn;
    char *text = buffers[turn++ % 4];
    snprintf(text, sizeof buffers[0], "{%s%s", extra, config + 1);
    return text;
}
