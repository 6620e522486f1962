/* family.h: what differs between the supported model families, as data. Defaults are those of the transformers model classes
 * (5.24), used when a key is absent from config.json. A new family of the same shape is a new row. */
#ifndef COLIBRI_MODEL_FAMILY_H
#define COLIBRI_MODEL_FAMILY_H

#include "config.h"

typedef enum window_rule {
    WINDOW_NEVER = 0,    /* the family has no sliding window */
    WINDOW_EVERY_LAYER,  /* sliding_window, when set, holds in all layers */
    WINDOW_IF_USED,      /* the same, but only under use_sliding_window */
    WINDOW_ALTERNATING   /* layer_types; without it, under use_sliding_window, the even layers below max_window_layers */
} window_rule;

typedef struct family {
    const char *model_type;
    const char *bias_key; /* NULL: no bias anywhere; "qkv_bias": of q, k, v; "attention_bias": of q, k, v and o */
    bool bias_default;
    bool always_renormalises; /* else norm_topk_prob, default false */
    bool has_dense_layers;    /* mlp_only_layers, decoder_sparse_step, and moe_intermediate_size beside intermediate_size */
    bool has_shared_expert, has_clip_qkv;
    qk_norm qk_norm;
    window_rule window;
    int64_t vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads /* 0: as many as heads */;
    int64_t intermediate_size, moe_intermediate_size, shared_expert_intermediate_size;
    int64_t num_experts, top_k, max_position_embeddings;
    double rms_norm_eps, rope_theta;
} family;

const family *family_find(const char *model_type); /* NULL: not supported */
const char *family_names(void);                    /* "mixtral, qwen2_moe, qwen3_moe, olmoe" */

#endif
