/* config.h: sizes and named semantics of a checkpoint, read from config.json and validated once.
 * Every field that changes a number is here; nothing has a silent default but those of the model class (family.c). */
#ifndef COLIBRI_MODEL_CONFIG_H
#define COLIBRI_MODEL_CONFIG_H

#include "../utils/status.h"

typedef enum qk_norm {
    QK_NORM_NONE = 0,
    QK_NORM_HEAD, /* per head, qwen3_moe */
    QK_NORM_FULL  /* whole projection, olmoe */
} qk_norm;

typedef enum rope_type { ROPE_DEFAULT = 0, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN } rope_type;

typedef struct rope_config {
    rope_type type;
    double theta;
    double factor;
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn */
    double attention_factor;                  /* yarn; as resolved: multiplies cos and sin; 1 for the other types */
    bool truncate;                            /* yarn */
    int64_t original_max_position_embeddings;
} rope_config;

typedef struct config {
    char model_type[32];
    int64_t vocab_size, hidden_size, num_hidden_layers, max_position_embeddings;
    int64_t num_attention_heads, num_key_value_heads, head_dim;
    int64_t intermediate_size;               /* width of dense layers; 0 when there is none */
    int64_t moe_intermediate_size;           /* width of one expert */
    int64_t shared_expert_intermediate_size; /* 0: no shared expert */
    int64_t num_experts, top_k;
    colibri_gate_mode gate_rule;             /* never COLIBRI_GATES_MODEL */
    float rms_norm_eps;
    qk_norm qk_norm;
    float clip_qkv;                          /* 0: none */
    bool qkv_bias, o_bias;                   /* of the attention projections */
    bool tie_word_embeddings;
    rope_config rope;                        /* halves are rotated: channel j with j + head_dim / 2 */
    bool is_moe[COLIBRI_MAX_LAYERS];
    int64_t window[COLIBRI_MAX_LAYERS];      /* keys a query sees, itself included; 0 = all */
} config;

/* json is the text of config.json, path its name for messages. FORMAT: broken, or its fields contradict each other; UNSUPPORTED:
 * a model type, an option, or a key that this engine does not know. */
colibri_status config_read(const char *json, size_t n_bytes, const char *path, config *out, colibri_message *message);

const char *gate_mode_name(colibri_gate_mode mode); /* "softmax_renormalised" ... */
const char *rope_type_name(rope_type type);

/* inv_freq [head_dim / 2], float32 as the reference rounds it (rope.c). */
void rope_inv_freq(const config *c, float *inv_freq);

/* How yarn scales cos and sin when the config gives no attention_factor; mscale and mscale_all_dim 0: not set. */
double rope_yarn_attention_factor(double factor, double mscale, double mscale_all_dim);

#endif
