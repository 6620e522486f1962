#include "family.h"

#include <string.h>

static const family families[] = {
    {.model_type = "mixtral", .always_renormalises = true, .window = WINDOW_EVERY_LAYER,
     .vocab_size = 32000, .hidden_size = 4096, .num_hidden_layers = 32, .num_attention_heads = 32, .num_key_value_heads = 8,
     .moe_intermediate_size = 14336, .num_experts = 8, .top_k = 2, .max_position_embeddings = 131072,
     .rms_norm_eps = 1e-5, .rope_theta = 1e6},
    {.model_type = "qwen2_moe", .bias_key = "qkv_bias", .bias_default = true, .has_dense_layers = true, .has_shared_expert = true,
     .window = WINDOW_ALTERNATING,
     .vocab_size = 151936, .hidden_size = 2048, .num_hidden_layers = 24, .num_attention_heads = 16, .num_key_value_heads = 16,
     .intermediate_size = 5632, .moe_intermediate_size = 1408, .shared_expert_intermediate_size = 5632,
     .num_experts = 60, .top_k = 4, .max_position_embeddings = 32768, .rms_norm_eps = 1e-6, .rope_theta = 1e4},
    {.model_type = "qwen3_moe", .bias_key = "attention_bias", .has_dense_layers = true, .qk_norm = QK_NORM_HEAD,
     .window = WINDOW_IF_USED,
     .vocab_size = 151936, .hidden_size = 2048, .num_hidden_layers = 24, .num_attention_heads = 32, .num_key_value_heads = 4,
     .intermediate_size = 6144, .moe_intermediate_size = 768,
     .num_experts = 128, .top_k = 8, .max_position_embeddings = 32768, .rms_norm_eps = 1e-6, .rope_theta = 1e4},
    {.model_type = "olmoe", .bias_key = "attention_bias", .has_clip_qkv = true, .qk_norm = QK_NORM_FULL,
     .vocab_size = 50304, .hidden_size = 2048, .num_hidden_layers = 16, .num_attention_heads = 16,
     .moe_intermediate_size = 2048,
     .num_experts = 64, .top_k = 8, .max_position_embeddings = 4096, .rms_norm_eps = 1e-5, .rope_theta = 1e4},
};

const family *family_find(const char *model_type)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strcmp(families[i].model_type, model_type) == 0)
            return &families[i];
    return NULL;
}

const char *family_names(void)
{
    return "mixtral, qwen2_moe, qwen3_moe, olmoe";
}
