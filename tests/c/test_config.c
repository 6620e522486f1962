/* config.json: both spellings, class defaults, and every contradiction refused by key, value and choice. */
#include "check.h"
#include "model/config.h"
#include "support/model_files.h"

static colibri_message message;
static config c;

static void accepted(const char *text)
{
    CHECK_OK(config_read(text, strlen(text), "config.json", &c, &message), message);
}

static void refused(colibri_status status, const char *text, const char *piece)
{
    colibri_status is = config_read(text, strlen(text), "config.json", &c, &message);
    if (is != status)
        fprintf(stderr, "status %d for %s (%s)\n", (int)is, text, is == COLIBRI_OK ? "opened" : message.text);
    CHECK(is == status);
    CHECK_MESSAGE_HAS(message, piece);
    CHECK_MESSAGE_HAS(message, "config.json");
}

/* The small mixtral with extra keys, which must not repeat its own. */
static void mixtral_accepts(const char *extra) { accepted(config_with(mixtral_config, extra)); }
static void mixtral_refuses(colibri_status status, const char *extra, const char *piece)
{
    refused(status, config_with(mixtral_config, extra), piece);
}

static const char qwen2[] = "{\"model_type\":\"qwen2_moe\",\"hidden_size\":8,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
                            "\"num_hidden_layers\":4,"
                            "\"num_experts\":4,\"num_experts_per_tok\":2,\"vocab_size\":11}";
static const char qwen3[] = "{\"model_type\":\"qwen3_moe\",\"hidden_size\":8,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
                            "\"num_hidden_layers\":4,"
                            "\"num_experts_per_tok\":2,\"vocab_size\":11}";
static const char olmoe[] = "{\"model_type\":\"olmoe\",\"hidden_size\":8,\"num_attention_heads\":2,\"num_hidden_layers\":4,"
                            "\"vocab_size\":11}";

static void test_absent_keys_take_the_defaults_of_the_model_class(void)
{
    accepted("{\"model_type\":\"mixtral\"}");
    CHECK(c.vocab_size == 32000 && c.hidden_size == 4096 && c.num_hidden_layers == 32 && c.num_attention_heads == 32);
    CHECK(c.num_key_value_heads == 8 && c.head_dim == 128 && c.moe_intermediate_size == 14336 && c.intermediate_size == 0);
    CHECK(c.num_experts == 8 && c.top_k == 2 && c.max_position_embeddings == 131072);
    CHECK(c.rms_norm_eps == 1e-5f && c.rope.theta == 1e6 && c.rope.type == ROPE_DEFAULT && c.rope.attention_factor == 1);
    CHECK(c.gate_rule == COLIBRI_GATES_SOFTMAX_RENORMALISED && c.qk_norm == QK_NORM_NONE && !c.qkv_bias && !c.o_bias &&
          c.clip_qkv == 0);
    CHECK(!c.tie_word_embeddings && c.is_moe[0] && c.is_moe[31] && c.window[0] == 0 && c.shared_expert_intermediate_size == 0);

    accepted("{\"model_type\":\"qwen2_moe\"}");
    CHECK(c.num_hidden_layers == 24 && c.num_experts == 60 && c.top_k == 4 && c.moe_intermediate_size == 1408);
    CHECK(c.shared_expert_intermediate_size == 5632 && c.intermediate_size == 0 && c.num_key_value_heads == 16);
    CHECK(c.gate_rule == COLIBRI_GATES_SOFTMAX && c.qkv_bias && !c.o_bias && c.rope.theta == 1e4 && c.rms_norm_eps == 1e-6f);

    accepted("{\"model_type\":\"qwen3_moe\"}");
    CHECK(c.num_experts == 128 && c.top_k == 8 && c.moe_intermediate_size == 768 && c.num_key_value_heads == 4 &&
          c.head_dim == 64);
    CHECK(c.gate_rule == COLIBRI_GATES_SOFTMAX && c.qk_norm == QK_NORM_HEAD && !c.qkv_bias && !c.o_bias && c.rope.theta == 1e4);

    accepted("{\"model_type\":\"olmoe\"}");
    CHECK(c.num_experts == 64 && c.top_k == 8 && c.moe_intermediate_size == 2048 && c.num_key_value_heads == 16);
    CHECK(c.gate_rule == COLIBRI_GATES_SOFTMAX && c.qk_norm == QK_NORM_FULL && c.rms_norm_eps == 1e-5f && c.clip_qkv == 0 &&
          c.rope.theta == 1e4);
}

static void test_the_named_semantics_are_read(void)
{
    accepted(config_with(qwen3, "\"norm_topk_prob\":true,\"attention_bias\":true,\"head_dim\":6,\"tie_word_embeddings\":true,"
                                "\"rms_norm_eps\":2e-05,"));
    CHECK(c.gate_rule == COLIBRI_GATES_SOFTMAX_RENORMALISED && c.qkv_bias && c.o_bias && c.head_dim == 6 &&
          c.tie_word_embeddings);
    CHECK(c.rms_norm_eps == 2e-5f);
    accepted(config_with(qwen2, "\"qkv_bias\":false,"));
    CHECK(!c.qkv_bias && !c.o_bias);
    accepted(config_with(olmoe, "\"clip_qkv\":1.5,\"num_key_value_heads\":null,"));
    CHECK(c.clip_qkv == 1.5f && c.num_key_value_heads == 2);
    mixtral_accepts("\"head_dim\":null,\"hidden_act\":\"swish\",\"max_position_embeddings\":4096.0,");
    CHECK(c.head_dim == 4 && c.max_position_embeddings == 4096);
}

static void test_J4_an_explicit_head_dim_wins_over_hidden_by_heads(void)
{
    accepted("{\"model_type\":\"qwen3_moe\",\"hidden_size\":2560,\"num_attention_heads\":32,\"head_dim\":128}");
    CHECK(c.head_dim == 128);
    accepted(
        "{\"model_type\":\"qwen3_moe\",\"hidden_size\":10,\"num_attention_heads\":4,\"head_dim\":8}"); /* 10 / 4 is no integer,
                                                                                                          and need not be */
    CHECK(c.head_dim == 8);
}

static void test_J3_theta_counts_at_the_top_and_inside_rope_parameters_alike(void)
{
    accepted(config_with(qwen3, "\"rope_theta\":1000000.0,"));
    config top = c;
    accepted(config_with(qwen3, "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1000000.0},"));
    CHECK(c.rope.theta == 1e6 && memcmp(&c, &top, sizeof c) == 0);
    accepted(config_with(qwen3, "\"rope_parameters\":{\"rope_type\":\"default\"},\"rope_theta\":1000000,"));
    CHECK(c.rope.theta == 1e6);
    accepted(config_with(qwen3, "\"rope_scaling\":null,\"rope_theta\":1000000,"));
    CHECK(c.rope.theta == 1e6 && c.rope.type == ROPE_DEFAULT);
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"rope_parameters\":{\"rope_theta\":5000.0},\"rope_theta\":10000.0,"),
            "rope_parameters.rope_theta = 5000");
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(qwen3, "\"rope_scaling\":{\"type\":\"hyper\",\"factor\":2.0},"),
            "rope_scaling.type = \"hyper\"");
    CHECK_MESSAGE_HAS(message, "default, linear, llama3, yarn");
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(qwen3, "\"rope_parameters\":{\"rope_type\":\"dynamic\",\"factor\":2.0},"),
            "\"dynamic\"");
}

static void test_scaled_rope_types_are_read_in_both_spellings(void)
{
    mixtral_accepts("\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0},");
    CHECK(c.rope.type == ROPE_LINEAR && c.rope.factor == 4 && c.rope.attention_factor == 1);
    mixtral_accepts("\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4."
                    "0,"
                    "\"original_max_position_embeddings\":8192},");
    CHECK(c.rope.type == ROPE_LLAMA3 && c.rope.low_freq_factor == 1 && c.rope.high_freq_factor == 4);
    CHECK(c.rope.original_max_position_embeddings == 8192 && c.rope.theta == 10000);
    mixtral_accepts("\"rope_scaling\":{\"type\":\"yarn\",\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_"
                    "embeddings\":512,\"beta_fast\":8.0},");
    CHECK(c.rope.type == ROPE_YARN && c.rope.beta_fast == 8 && c.rope.beta_slow == 1 && c.rope.truncate);
    CHECK(c.rope.attention_factor > 1.13862943 && c.rope.attention_factor < 1.13862944); /* 0.1 ln 4 + 1 */
    mixtral_accepts("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"attention_factor\":1.5,\"truncate\":false},\"max_"
                    "position_embeddings\":640,");
    CHECK(c.rope.attention_factor == 1.5 && !c.rope.truncate && c.rope.original_max_position_embeddings == 640);
    mixtral_accepts("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_"
                    "position_embeddings\":64},");
    CHECK(c.rope.attention_factor == 1);
    mixtral_accepts(
        "\"max_position_embeddings\":1024,\"original_max_position_embeddings\":256,"
        "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":null,\"original_max_position_embeddings\":512},"); /* the top level wins
                                                                                                            */
    CHECK(c.rope.original_max_position_embeddings == 256 && c.rope.factor == 4);
    mixtral_accepts("\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0},\"rope_parameters\":{\"rope_type\":\"linear\","
                    "\"factor\":4},");
    mixtral_refuses(COLIBRI_ERROR_FORMAT,
                    "\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0},\"rope_parameters\":{\"rope_type\":\"default\"},",
                    "rope_scaling");
}

static void test_rope_options_that_cannot_be_honoured_are_refused(void)
{
    mixtral_refuses(COLIBRI_ERROR_FORMAT, "\"rope_scaling\":{\"type\":\"linear\"},", "rope_scaling.factor is missing");
    mixtral_refuses(COLIBRI_ERROR_FORMAT, "\"rope_scaling\":{\"type\":\"linear\",\"factor\":0},", "above 0");
    mixtral_refuses(COLIBRI_ERROR_FORMAT, "\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":\"yarn\",\"factor\":2},",
                    "differ");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"alpha\":3},",
                    "rope_scaling.alpha = 3");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"beta_fast\":3},",
                    "rope_scaling.beta_fast");
    mixtral_refuses(COLIBRI_ERROR_FORMAT, "\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2},", "low_freq_factor is missing");
    mixtral_refuses(COLIBRI_ERROR_FORMAT,
                    "\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2,\"low_freq_factor\":4,\"high_freq_factor\":4},",
                    "above low_freq");
    mixtral_refuses(COLIBRI_ERROR_FORMAT, "\"rope_scaling\":\"yarn\",", "an object or null");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"rope_scaling\":{\"type\":3},", "rope_scaling.type = 3");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"partial_rotary_factor\":0.5,", "partial_rotary_factor = 0.5");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"rope_parameters\":{\"partial_rotary_factor\":0.25},",
                    "rope_parameters.partial_rotary_factor");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1.0}},",
                    "rope_parameters.full_attention");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"original_max_position_embeddings\":512,", "original_max_position_embeddings");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"rope_theta\":-1,"), "rope_theta = -1");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"rope_theta\":1e39,"), "from 1e-30 to 1e30"); /* infinite in float32 */
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"rope_theta\":1e-50,"), "from 1e-30 to 1e30");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"rope_theta\":\"1e6\","), "a number above 0");
}

static void test_which_layers_are_a_mixture(void)
{
    accepted(config_with(qwen2, "\"decoder_sparse_step\":2,\"intermediate_size\":40,"));
    CHECK(!c.is_moe[0] && c.is_moe[1] && !c.is_moe[2] && c.is_moe[3] && c.intermediate_size == 40);
    accepted(config_with(qwen3, "\"mlp_only_layers\":[1,3],"));
    CHECK(c.is_moe[0] && !c.is_moe[1] && c.is_moe[2] && !c.is_moe[3] && c.intermediate_size == 6144);
    accepted(config_with(qwen3, "\"mlp_only_layers\":null,\"decoder_sparse_step\":1,"));
    CHECK(c.is_moe[0] && c.is_moe[3] && c.intermediate_size == 0);
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"mlp_only_layers\":[4],"), "mlp_only_layers holds 4");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"mlp_only_layers\":[-1],"), "mlp_only_layers holds -1");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"mlp_only_layers\":[\"1\"],"), "mlp_only_layers holds \"1\"");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"mlp_only_layers\":1,"), "a list of layer numbers");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"decoder_sparse_step\":0,"), "decoder_sparse_step = 0");
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(qwen3, "\"decoder_sparse_step\":5,"), "no mixture-of-experts layer");
}

static void test_sliding_windows_follow_each_familys_rule(void)
{
    mixtral_accepts("\"sliding_window\":7,");
    CHECK(c.window[0] == 7 && c.window[1] == 7);
    mixtral_accepts("\"sliding_window\":null,");
    CHECK(c.window[0] == 0);
    mixtral_refuses(COLIBRI_ERROR_FORMAT, "\"sliding_window\":0,", "sliding_window = 0");
    accepted(config_with(qwen3, "\"sliding_window\":7,"));
    CHECK(c.window[0] == 0); /* only under use_sliding_window */
    accepted(config_with(qwen3, "\"sliding_window\":7,\"use_sliding_window\":true,\"max_window_layers\":28,"));
    CHECK(c.window[0] == 7 && c.window[1] == 7 && c.window[3] == 7);
    accepted(config_with(qwen3, "\"use_sliding_window\":true,"));
    CHECK(c.window[3] == 4096);
    accepted(config_with(qwen3, "\"use_sliding_window\":true,\"sliding_window\":null,"));
    CHECK(c.window[3] == 0);
    accepted(config_with(qwen2, "\"sliding_window\":6,\"use_sliding_window\":true,\"max_window_layers\":1,"));
    CHECK(c.window[0] == 6 && c.window[1] == 0 && c.window[2] == 0 && c.window[3] == 0);
    accepted(config_with(qwen2, "\"sliding_window\":6,\"use_sliding_window\":true,"));
    CHECK(c.window[0] == 6 && c.window[1] == 0 && c.window[2] == 6 && c.window[3] == 0);
    accepted(config_with(qwen2, "\"sliding_window\":0,\"use_sliding_window\":false,"));
    CHECK(c.window[0] == 0);
#define LAYERS(a, b, c, d) "\"layer_types\":[\"" a "\",\"" b "\",\"" c "\",\"" d "\"],"
#define FULL "full_attention"
#define SLIDING "sliding_attention"
    accepted(config_with(qwen2, "\"sliding_window\":6,\"use_sliding_window\":true," LAYERS(FULL, SLIDING, FULL, FULL)));
    CHECK(c.window[0] == 0 && c.window[1] == 6 && c.window[2] == 0);
    accepted(config_with(qwen3, LAYERS(FULL, FULL, FULL, FULL)));
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen2, LAYERS(SLIDING, FULL, FULL, FULL)), "contradicts sliding_window");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, LAYERS(FULL, FULL, SLIDING, FULL)), "layer_types[2]");
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(qwen2, LAYERS(FULL, "linear_attention", FULL, FULL)),
            "layer_types[1] = \"linear_attention\"");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen2, "\"layer_types\":[\"full_attention\"],"), "one entry for each");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen2, "\"use_sliding_window\":true,\"sliding_window\":null,"),
            "sliding_window is null");
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(olmoe, "\"sliding_window\":6,"), "sliding_window = 6");
}

static void test_the_number_of_experts_may_have_either_name_but_one_value(void)
{
    accepted(config_with(qwen3, "\"num_local_experts\":8,"));
    CHECK(c.num_experts == 8);
    accepted(config_with(qwen3, "\"num_experts\":8,\"num_local_experts\":8,"));
    CHECK(c.num_experts == 8);
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"num_experts\":8,\"num_local_experts\":9,"),
            "num_experts = 8 and num_local_experts = 9");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"num_experts\":1,"), "num_experts_per_tok = 2 is more than the 1 experts");
    refused(COLIBRI_ERROR_FORMAT, config_with(qwen3, "\"num_experts\":0,"), "an integer from 1");
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(qwen3, "\"num_experts\":1025,"), "num_experts = 1025"); /* K1: a clear limit */
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(qwen3, "\"num_experts\":1025,"), "COLIBRI_MAX_EXPERTS = 1024");
    accepted(config_with(qwen3, "\"num_experts\":1024,"));
}

static void test_sizes_that_make_no_sense_are_refused_by_key_and_value(void)
{
    static const struct { const char *text, *piece; } cases[] = {
        {"{\"model_type\":\"mixtral\",\"hidden_size\":0}", "hidden_size = 0"},
        {"{\"model_type\":\"mixtral\",\"hidden_size\":-8}", "hidden_size = -8"},
        {"{\"model_type\":\"mixtral\",\"hidden_size\":\"8\"}", "hidden_size = \"8\""},
        {"{\"model_type\":\"mixtral\",\"hidden_size\":8.5}", "hidden_size = 8.5"},
        {"{\"model_type\":\"mixtral\",\"hidden_size\":true}", "hidden_size = true"},
        {"{\"model_type\":\"mixtral\",\"hidden_size\":[8]}", "hidden_size = a list"},
        {"{\"model_type\":\"mixtral\",\"hidden_size\":4611686018427387904}", "hidden_size"},
        {"{\"model_type\":\"mixtral\",\"hidden_size\":4098}", "not a multiple of num_attention_heads"},
        {"{\"model_type\":\"mixtral\",\"num_key_value_heads\":7}", "not a multiple of num_key_value_heads = 7"},
        {"{\"model_type\":\"mixtral\",\"num_key_value_heads\":64}", "num_key_value_heads = 64"},
        {"{\"model_type\":\"mixtral\",\"head_dim\":5}", "head_dim = 5 is odd"},
        {"{\"model_type\":\"mixtral\",\"head_dim\":2147483646}", "beyond 2^31"},
        {"{\"model_type\":\"mixtral\",\"num_hidden_layers\":0}", "num_hidden_layers = 0"},
        {"{\"model_type\":\"mixtral\",\"num_hidden_layers\":1025}", "from 1 to 1024"},
        {"{\"model_type\":\"mixtral\",\"vocab_size\":2147483648}", "vocab_size"},
        {"{\"model_type\":\"mixtral\",\"rms_norm_eps\":0}", "rms_norm_eps = 0"},
        {"{\"model_type\":\"mixtral\",\"rms_norm_eps\":\"1e-5\"}", "rms_norm_eps"},
        {"{\"model_type\":\"mixtral\",\"tie_word_embeddings\":1}", "true or false"},
        {"{\"model_type\":\"olmoe\",\"clip_qkv\":-1}", "clip_qkv = -1"},
        {"{\"model_type\":\"qwen2_moe\",\"norm_topk_prob\":\"yes\"}", "norm_topk_prob"},
        {"{\"model_type\":\"qwen2_moe\",\"shared_expert_intermediate_size\":0}", "shared_expert_intermediate_size = 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused(COLIBRI_ERROR_FORMAT, cases[i].text, cases[i].piece);
}

static void test_other_architectures_and_formats_are_refused_with_the_supported_ones(void)
{
    refused(COLIBRI_ERROR_UNSUPPORTED, "{\"model_type\":\"deepseek_v3\"}", "mixtral, qwen2_moe, qwen3_moe, olmoe");
    CHECK_MESSAGE_HAS(message, "\"deepseek_v3\"");
    refused(COLIBRI_ERROR_UNSUPPORTED, "{\"model_type\":\"qwen3_vl_moe\",\"text_config\":{},\"vision_config\":{\"depth\":2}}",
            "vision_config");
    refused(COLIBRI_ERROR_FORMAT, "{\"hidden_size\":8}", "no model_type");
    refused(COLIBRI_ERROR_FORMAT, "{\"model_type\":7}", "a string was expected");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"quantization_config\":{\"quant_method\":\"fp8\"},", "fp8");
    CHECK_MESSAGE_HAS(message, "float32, float16 and bfloat16");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"hidden_act\":\"gelu\",", "hidden_act = \"gelu\"");
    CHECK_MESSAGE_HAS(message, "\"silu\"");
}

static void test_an_unknown_key_is_refused_unless_it_cannot_matter(void)
{
    mixtral_accepts("\"_name_or_path\":\"x\",\"architectures\":[\"MixtralForCausalLM\"],\"torch_dtype\":\"bfloat16\",\"attention_"
                    "dropout\":0.1,"
                    "\"router_jitter_noise\":0.1,\"eos_token_id\":[1,2],\"id2label\":{\"0\":\"a\"},\"use_cache\":true,");
    mixtral_accepts("\"new_null\":null,\"new_false\":false,\"new_text\":\"\",\"new_list\":[],\"new_object\":{},\"_private\":3,");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"logit_softcap\":30.0,", "logit_softcap = 30");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"attention_bias\":true,", "attention_bias = true");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"embedding_multiplier\":0,", "embedding_multiplier = 0");
    mixtral_refuses(COLIBRI_ERROR_UNSUPPORTED, "\"norm_topk_prob\":true,", "norm_topk_prob");
    refused(COLIBRI_ERROR_UNSUPPORTED, config_with(olmoe, "\"moe_intermediate_size\":20,"), "moe_intermediate_size = 20");
}

static void test_a_config_must_be_one_json_object(void)
{
    refused(COLIBRI_ERROR_FORMAT, "[]", "must hold a JSON object");
    refused(COLIBRI_ERROR_FORMAT, "\"mixtral\"", "must hold a JSON object");
    refused(COLIBRI_ERROR_FORMAT, "", "empty");
    refused(COLIBRI_ERROR_FORMAT, "{\"model_type\":\"mixtral\",\"model_type\":\"olmoe\"}", "\"model_type\" occurs twice");
    refused(COLIBRI_ERROR_FORMAT, "{\"model_type\":\"mixtral\",\"model_\\u0074ype\":\"olmoe\"}", "\"model_type\" occurs twice");
    refused(COLIBRI_ERROR_FORMAT, "{\"model_type\":\"mixtral\",\"rms_norm_eps\":NaN}", "line 1, column");
    refused(COLIBRI_ERROR_FORMAT, "version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer");
    refused(COLIBRI_ERROR_FORMAT, "<!DOCTYPE html>", "web page");
}

int main(void)
{
    RUN(test_absent_keys_take_the_defaults_of_the_model_class);
    RUN(test_the_named_semantics_are_read);
    RUN(test_J4_an_explicit_head_dim_wins_over_hidden_by_heads);
    RUN(test_J3_theta_counts_at_the_top_and_inside_rope_parameters_alike);
    RUN(test_scaled_rope_types_are_read_in_both_spellings);
    RUN(test_rope_options_that_cannot_be_honoured_are_refused);
    RUN(test_which_layers_are_a_mixture);
    RUN(test_sliding_windows_follow_each_familys_rule);
    RUN(test_the_number_of_experts_may_have_either_name_but_one_value);
    RUN(test_sizes_that_make_no_sense_are_refused_by_key_and_value);
    RUN(test_other_architectures_and_formats_are_refused_with_the_supported_ones);
    RUN(test_an_unknown_key_is_refused_unless_it_cannot_matter);
    RUN(test_a_config_must_be_one_json_object);
    return 0;
}
