/* The checkpoints of all four families: which weights each has, and that biases, norms and layers must agree with the config. */
#include "check.h"
#include "model/weights.h"
#include "support/model_files.h"
#include "support/tiny_checkpoint.h"

static colibri_message message;
static model_data *m;

static bool has_weight(const char *name)
{
    for (size_t i = 0; i < model_data_weight_count(m); i++)
        if (strcmp(model_data_weight(m, i).name, name) == 0)
            return true;
    return false;
}

static void opens(tiny_checkpoint *t)
{
    tiny_checkpoint_write(t);
    CHECK_OK(model_data_open(t->folder, &m, &message), message);
}

static void close_model(const tiny_checkpoint *t)
{
    model_data_free(m);
    tiny_checkpoint_remove(t);
}

/* Puts `extra` behind the opening brace of the folder's config.json, after removing the member `key` (a number or a word). */
static void edit_config(const tiny_checkpoint *t, const char *key, const char *extra)
{
    char path[320], text[4096], quoted[64];
    snprintf(path, sizeof path, "%s/config.json", t->folder);
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = '\0';
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    char *member = strstr(text, quoted);
    if (member != NULL) {
        size_t length = strcspn(member, ",}");
        bool is_last = member[length] == '}';
        memmove(member, member + length + !is_last, strlen(member + length + !is_last) + 1);
        if (is_last)
            *strrchr(text, ',') = ' ';
    }
    file_write_text(path, config_with(strchr(text, '{'), extra));
}

static void refused(tiny_checkpoint *t, const char *key, const char *extra, const char *piece)
{
    tiny_checkpoint_write(t);
    edit_config(t, key, extra);
    CHECK(model_data_open(t->folder, &m, &message) == COLIBRI_ERROR_FORMAT);
    CHECK_MESSAGE_HAS(message, piece);
    tiny_checkpoint_remove(t);
}

static void test_every_family_has_its_weights_and_no_others(void)
{
    tiny_checkpoint t = tiny_mixtral();
    opens(&t);
    CHECK(has_weight("layers.2.moe.experts.5.down") && !has_weight("layers.0.attn.q.bias") &&
          !has_weight("layers.0.attn.q_norm"));
    CHECK(m->config.window[0] == 5 && !has_weight("layers.0.mlp.gate"));
    close_model(&t);

    t = tiny_qwen2_moe();
    opens(&t);
    CHECK(has_weight("layers.0.attn.q.bias") && has_weight("layers.0.attn.k.bias") && has_weight("layers.0.attn.v.bias"));
    CHECK(!has_weight("layers.0.attn.o.bias") && has_weight("layers.0.moe.shared.up") && has_weight("layers.0.moe.shared_gate"));
    CHECK(has_weight("layers.1.mlp.gate") && !has_weight("layers.1.moe.router") && !has_weight("layers.1.moe.shared.gate"));
    CHECK(m->weights.layers[0].shared_gate.rows == 1 && m->weights.layers[0].shared_gate.cols == 40);
    CHECK(m->weights.layers[1].experts == NULL && m->weights.layers[1].shared.gate.data == NULL);
    CHECK(m->weights.layers[0].mlp.gate.data == NULL && m->weights.layers[0].o_bias.data == NULL);
    close_model(&t);

    t = tiny_qwen3_moe();
    opens(&t);
    CHECK(m->weights.layers[0].q_norm.cols == m->config.head_dim && !has_weight("layers.0.moe.shared_gate"));
    close_model(&t);

    t = tiny_olmoe();
    opens(&t);
    CHECK(m->weights.layers[0].q_norm.cols == m->config.num_attention_heads * m->config.head_dim);
    CHECK(m->weights.layers[0].k_norm.cols == m->config.num_key_value_heads * m->config.head_dim && m->config.clip_qkv > 0);
    close_model(&t);
}

static void test_biases_must_agree_with_the_config(void)
{
    tiny_checkpoint t = tiny_qwen2_moe();
    refused(&t, "qkv_bias", "\"qkv_bias\":false,", "has no bias");
    CHECK_MESSAGE_HAS(message, "_proj.bias");
    t = tiny_qwen3_moe();
    refused(&t, "attention_bias", "\"attention_bias\":true,", "missing: model.layers.0.self_attn.q_proj.bias");
    CHECK_MESSAGE_HAS(message, "model.layers.0.self_attn.o_proj.bias");
}

static void test_a_dense_layer_where_the_config_wants_experts_is_refused(void)
{
    tiny_checkpoint t = tiny_qwen2_moe();
    t.dense_layer = -1;
    tiny_checkpoint_write(&t);
    edit_config(&t, "decoder_sparse_step", "\"decoder_sparse_step\":2,");
    CHECK(model_data_open(t.folder, &m, &message) == COLIBRI_ERROR_FORMAT);
    CHECK_MESSAGE_HAS(message, "model.layers.0.mlp.gate_proj.weight");
    tiny_checkpoint_remove(&t);
}

int main(void)
{
    RUN(test_every_family_has_its_weights_and_no_others);
    RUN(test_biases_must_agree_with_the_config);
    RUN(test_a_dense_layer_where_the_config_wants_experts_is_refused);
    return 0;
}
