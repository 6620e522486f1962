#include "tiny_checkpoint.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../check.h"

uint32_t tiny_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX; the high half is mixed enough */
    uint32_t x = (uint32_t)(*state >> 32);
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 13;
    return x;
}

tiny_checkpoint tiny_mixtral(void)
{
    return (tiny_checkpoint){.model_type = "mixtral",
                             .layers = 3,
                             .hidden = 24,
                             .heads = 4,
                             .kv_heads = 2,
                             .head_dim = 6,
                             .vocab = 50,
                             .experts = 6,
                             .top_k = 2,
                             .width = 19,
                             .dense_layer = -1,
                             .window = 5,
                             .max_positions = 4096,
                             .seed = 1};
}

tiny_checkpoint tiny_qwen2_moe(void)
{
    return (tiny_checkpoint){.model_type = "qwen2_moe",
                             .layers = 3,
                             .hidden = 40,
                             .heads = 4,
                             .kv_heads = 2,
                             .head_dim = 10,
                             .vocab = 50,
                             .experts = 5,
                             .top_k = 3,
                             .width = 17,
                             .shared_width = 23,
                             .dense_layer = 1,
                             .max_positions = 4096,
                             .seed = 2};
}

tiny_checkpoint tiny_qwen3_moe(void)
{
    return (tiny_checkpoint){.model_type = "qwen3_moe",
                             .layers = 2,
                             .hidden = 24,
                             .heads = 6,
                             .kv_heads = 3,
                             .head_dim = 16,
                             .vocab = 50,
                             .experts = 9,
                             .top_k = 4,
                             .width = 20,
                             .dense_layer = -1,
                             .max_positions = 4096,
                             .seed = 3};
}

tiny_checkpoint tiny_olmoe(void)
{
    return (tiny_checkpoint){.model_type = "olmoe",
                             .layers = 2,
                             .hidden = 32,
                             .heads = 4,
                             .kv_heads = 4,
                             .head_dim = 8,
                             .vocab = 50,
                             .experts = 8,
                             .top_k = 4,
                             .width = 16,
                             .dense_layer = -1,
                             .max_positions = 4096,
                             .clip_qkv = 0.5f,
                             .seed = 4};
}

/* ---- the file -------------------------------------------------------------------------------------------------------------- */

typedef struct writer {
    const tiny_checkpoint *t;
    FILE *header, *data;
    int64_t n_bytes;
    uint64_t random;
    bool planted;
} writer;

/* Uniform values of the given spread about a centre; [rows, cols], or a vector when rows is 0. */
static void tensor(writer *w, const char *name, int rows, int cols, float centre, float spread)
{
    int64_t n = (int64_t)(rows > 0 ? rows : 1) * cols;
    bool plant = w->t->plant_tensor != NULL && strcmp(w->t->plant_tensor, name) == 0;
    fprintf(w->header, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[", w->n_bytes > 0 ? "," : "", name);
    if (rows > 0)
        fprintf(w->header, "%d,", rows);
    fprintf(w->header, "%d],\"data_offsets\":[%lld,%lld]}", cols, (long long)w->n_bytes, (long long)(w->n_bytes + n * 4));
    for (int64_t i = 0; i < n; i++) {
        float value = centre + spread * ((float)tiny_random(&w->random) / 2147483648.0f - 1);
        if (plant && (w->t->plant_index < 0 || w->t->plant_index == i))
            value = w->t->plant_value;
        CHECK(fwrite(&value, sizeof value, 1, w->data) == 1);
    }
    w->n_bytes += n * 4;
    w->planted = w->planted || plant;
}

static void layer_tensor(writer *w, int layer, const char *name, int rows, int cols, float centre, float spread)
{
    char full[128];
    snprintf(full, sizeof full, "model.layers.%d.%s", layer, name);
    tensor(w, full, rows, cols, centre, spread);
}

static void ffn_tensors(writer *w, int layer, const char *prefix, const char *const names[3], int width)
{
    char name[96];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s%s.weight", prefix, names[i]);
        layer_tensor(w, layer, name, i < 2 ? width : w->t->hidden, i < 2 ? w->t->hidden : width, 0, 0.6f);
    }
}

static void layer_tensors(writer *w, int l)
{
    static const char *const hub[] = {"gate_proj", "up_proj", "down_proj"}, *const mixtral[] = {"w1", "w3", "w2"};
    const tiny_checkpoint *t = w->t;
    bool is_mixtral = strcmp(t->model_type, "mixtral") == 0, is_qwen2 = strcmp(t->model_type, "qwen2_moe") == 0;
    bool is_qwen3 = strcmp(t->model_type, "qwen3_moe") == 0, is_olmoe = strcmp(t->model_type, "olmoe") == 0;
    int q = t->heads * t->head_dim, kv = t->kv_heads * t->head_dim;

    layer_tensor(w, l, "input_layernorm.weight", 0, t->hidden, 1, 0.3f);
    layer_tensor(w, l, "post_attention_layernorm.weight", 0, t->hidden, 1, 0.3f);
    layer_tensor(w, l, "self_attn.q_proj.weight", q, t->hidden, 0, 0.5f);
    layer_tensor(w, l, "self_attn.k_proj.weight", kv, t->hidden, 0, 0.5f);
    layer_tensor(w, l, "self_attn.v_proj.weight", kv, t->hidden, 0, 0.5f);
    layer_tensor(w, l, "self_attn.o_proj.weight", t->hidden, q, 0, 0.5f);
    if (is_qwen2) {
        layer_tensor(w, l, "self_attn.q_proj.bias", 0, q, 0, 0.5f);
        layer_tensor(w, l, "self_attn.k_proj.bias", 0, kv, 0, 0.5f);
        layer_tensor(w, l, "self_attn.v_proj.bias", 0, kv, 0, 0.5f);
    }
    if (is_qwen3 || is_olmoe) {
        layer_tensor(w, l, "self_attn.q_norm.weight", 0, is_olmoe ? q : t->head_dim, 1, 0.3f);
        layer_tensor(w, l, "self_attn.k_norm.weight", 0, is_olmoe ? kv : t->head_dim, 1, 0.3f);
    }
    if (l == t->dense_layer) {
        ffn_tensors(w, l, "mlp.", hub, 2 * t->width);
        return;
    }
    layer_tensor(w, l, is_mixtral ? "block_sparse_moe.gate.weight" : "mlp.gate.weight", t->experts, t->hidden, 0, 0.5f);
    for (int e = 0; e < t->experts; e++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, is_mixtral ? "block_sparse_moe.experts.%d." : "mlp.experts.%d.", e);
        ffn_tensors(w, l, prefix, is_mixtral ? mixtral : hub, t->width);
    }
    if (is_qwen2) {
        ffn_tensors(w, l, "mlp.shared_expert.", hub, t->shared_width);
        layer_tensor(w, l, "mlp.shared_expert_gate.weight", 1, t->hidden, 0, 0.5f);
    }
}

static void write_config(const tiny_checkpoint *t, FILE *f)
{
    fprintf(f, "{\"model_type\": \"%s\", \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0",
            t->model_type);
    fprintf(f, ", \"vocab_size\": %d, \"hidden_size\": %d, \"num_hidden_layers\": %d", t->vocab, t->hidden, t->layers);
    fprintf(f, ", \"num_attention_heads\": %d, \"num_key_value_heads\": %d", t->heads, t->kv_heads);
    fprintf(f, ", \"max_position_embeddings\": %d, \"num_experts_per_tok\": %d", t->max_positions, t->top_k);
    fprintf(f, ", \"tie_word_embeddings\": false");
    if (strcmp(t->model_type, "mixtral") == 0) {
        fprintf(f, ", \"num_local_experts\": %d, \"intermediate_size\": %d", t->experts, t->width);
        if (t->window > 0)
            fprintf(f, ", \"sliding_window\": %d", t->window);
    } else if (strcmp(t->model_type, "olmoe") == 0) {
        fprintf(f, ", \"num_experts\": %d, \"intermediate_size\": %d, \"norm_topk_prob\": false", t->experts, t->width);
        if (t->clip_qkv > 0)
            fprintf(f, ", \"clip_qkv\": %g", (double)t->clip_qkv);
    } else {
        fprintf(f, ", \"num_experts\": %d, \"moe_intermediate_size\": %d, \"intermediate_size\": %d", t->experts, t->width,
                2 * t->width);
        fprintf(f, ", \"norm_topk_prob\": %s, \"decoder_sparse_step\": 1",
                strcmp(t->model_type, "qwen3_moe") == 0 ? "true" : "false");
        if (t->dense_layer >= 0)
            fprintf(f, ", \"mlp_only_layers\": [%d]", t->dense_layer);
        if (t->shared_width > 0)
            fprintf(f, ", \"shared_expert_intermediate_size\": %d", t->shared_width);
    }
    if (strcmp(t->model_type, "qwen3_moe") == 0)
        fprintf(f, ", \"head_dim\": %d", t->head_dim);
    fprintf(f, "}\n");
}

static FILE *open_in(const char *folder, const char *name, const char *mode)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, mode);
    CHECK(f != NULL);
    return f;
}

static void copy_all(FILE *from, FILE *to)
{
    char buffer[4096];
    size_t n;
    rewind(from);
    while ((n = fread(buffer, 1, sizeof buffer, from)) > 0)
        CHECK(fwrite(buffer, 1, n, to) == n);
    fclose(from);
}

void tiny_checkpoint_write(tiny_checkpoint *t)
{
    const char *base = getenv("TMPDIR");
    snprintf(t->folder, sizeof t->folder, "%s/colibri-test-XXXXXX", base != NULL ? base : "/tmp");
    CHECK(mkdtemp(t->folder) != NULL);

    FILE *config = open_in(t->folder, "config.json", "w");
    write_config(t, config);
    fclose(config);

    writer w = {.t = t, .header = tmpfile(), .data = tmpfile(), .random = t->seed};
    CHECK(w.header != NULL && w.data != NULL);
    fprintf(w.header, "{");
    tensor(&w, "model.embed_tokens.weight", t->vocab, t->hidden, 0, 1);
    for (int l = 0; l < t->layers; l++)
        layer_tensors(&w, l);
    tensor(&w, "model.norm.weight", 0, t->hidden, 1, 0.3f);
    tensor(&w, "lm_head.weight", t->vocab, t->hidden, 0, 0.5f);
    fprintf(w.header, "}");
    CHECK(t->plant_tensor == NULL || w.planted);
    while (ftell(w.header) % 8 != 0)
        fputc(' ', w.header);

    uint64_t size = (uint64_t)ftell(w.header);
    unsigned char little[8];
    for (int i = 0; i < 8; i++)
        little[i] = (unsigned char)(size >> (8 * i));
    FILE *file = open_in(t->folder, "model.safetensors", "wb");
    CHECK(fwrite(little, 1, 8, file) == 8);
    copy_all(w.header, file);
    copy_all(w.data, file);
    fclose(file);
}

void tiny_checkpoint_remove(const tiny_checkpoint *t)
{
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", t->folder);
    remove(path);
    snprintf(path, sizeof path, "%s/model.safetensors", t->folder);
    remove(path);
    rmdir(t->folder);
}
