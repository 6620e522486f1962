#include "config.h"

#include "config_parts.h"
#include "foreign.h"
#include "json.h"

#include <stdio.h>
#include <string.h>

/* Keys of config.json that do not change what the forward pass computes: bookkeeping, training, defaults of generation. */
static const char *const harmless[] = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "output_router_logits", "output_attentions",
    "output_hidden_states", "return_dict", "torchscript", "use_bfloat16", "is_decoder", "name_or_path", "model_name",
    "license", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "tokenizer_class", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "initializer_range",
    "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "pretraining_tp", "finetuning_task",
    "task_specific_params", "problem_type", "id2label", "label2id", "num_labels", "chunk_size_feed_forward", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "num_return_sequences", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "prefix",
    "unsloth_fixed", "unsloth_version",
};

const char *gate_mode_name(colibri_gate_mode mode)
{
    static const char *const names[] = {"model", "softmax", "softmax_renormalised", "softmax_of_chosen", "raw_logits"};
    return names[mode];
}

static colibri_status read_family(options *o, const family **f)
{
    const char *model_type = NULL;
    TRY(options_text(o, "model_type", NULL, &model_type));
    if (model_type == NULL)
        return fail(o->message, COLIBRI_ERROR_FORMAT, "%s has no model_type; supported are %s", o->path, family_names());
    *f = family_find(model_type);
    if (*f == NULL && (json_member(o->object, "vision_config") != NULL || json_member(o->object, "text_config") != NULL))
        return fail(o->message, COLIBRI_ERROR_UNSUPPORTED,
                    "%s: model_type \"%.100s\" wraps a language model with other parts (text_config, "
                    "vision_config), which is not supported; supported are the plain language models %s",
                    o->path, model_type, family_names());
    if (*f == NULL)
        return fail(o->message, COLIBRI_ERROR_UNSUPPORTED, "%s: model_type \"%.100s\" is not supported; supported are %s",
                    o->path, model_type, family_names());
    const json_node *quantised = options_find(o, "quantization_config");
    if (quantised == NULL)
        quantised = options_find(o, "compression_config");
    if (quantised != NULL) {
        const json_node *method = json_member(quantised, "quant_method");
        return fail(o->message, COLIBRI_ERROR_UNSUPPORTED,
                    "%s: %s (method %.60s): quantised weights are not supported; supported are float32, "
                    "float16 and bfloat16",
                    o->path, quantised->key, method != NULL && method->kind == JSON_STRING ? method->as.text : "not named");
    }
    return COLIBRI_OK;
}

/* num_experts, by whichever of its names; several must agree. */
static colibri_status read_expert_count(options *o, const family *f, config *c)
{
    static const char *const names[] = {"num_experts", "num_local_experts", "n_routed_experts"};
    const char *given = NULL;
    c->num_experts = f->num_experts;
    for (int i = 0; i < 3; i++) {
        int64_t count;
        if (options_find(o, names[i]) == NULL)
            continue;
        TRY(options_integer(o, names[i], 0, 1, INT32_MAX, &count));
        if (count > COLIBRI_MAX_EXPERTS)
            return fail(o->message, COLIBRI_ERROR_UNSUPPORTED, "%s: %s = %lld; this build holds at most COLIBRI_MAX_EXPERTS = %d "
                        "(colibri_config.h)", o->path, names[i], (long long)count, COLIBRI_MAX_EXPERTS);
        if (given != NULL && count != c->num_experts)
            return fail(o->message, COLIBRI_ERROR_FORMAT,
                        "%s: %s = %lld and %s = %lld name the number of experts twice and differ", o->path, given,
                        (long long)c->num_experts, names[i], (long long)count);
        given = names[i];
        c->num_experts = count;
    }
    TRY(options_integer(o, "num_experts_per_tok", f->top_k, 1, COLIBRI_MAX_EXPERTS, &c->top_k));
    if (c->top_k > c->num_experts)
        return fail(o->message, COLIBRI_ERROR_FORMAT, "%s: num_experts_per_tok = %lld is more than the %lld experts there are",
                    o->path, (long long)c->top_k, (long long)c->num_experts);
    return COLIBRI_OK;
}

static colibri_status read_heads(options *o, const family *f, config *c)
{
    const int64_t most = INT32_MAX;
    TRY(options_integer(o, "num_attention_heads", f->num_attention_heads, 1, most, &c->num_attention_heads));
    /* null means as many as there are heads, absent the class default */
    bool absent = json_member(o->object, "num_key_value_heads") == NULL;
    int64_t otherwise = absent && f->num_key_value_heads > 0 ? f->num_key_value_heads : c->num_attention_heads;
    TRY(options_integer(o, "num_key_value_heads", otherwise, 1, most, &c->num_key_value_heads));
    if (c->num_attention_heads % c->num_key_value_heads != 0)
        return fail(o->message, COLIBRI_ERROR_FORMAT,
                    "%s: num_attention_heads = %lld is not a multiple of num_key_value_heads = %lld", o->path,
                    (long long)c->num_attention_heads, (long long)c->num_key_value_heads);
    TRY(options_integer(o, "head_dim", 0, 1, most, &c->head_dim));
    if (c->head_dim == 0) {
        if (c->hidden_size % c->num_attention_heads != 0)
            return fail(o->message, COLIBRI_ERROR_FORMAT,
                        "%s: hidden_size = %lld is not a multiple of num_attention_heads = %lld, and no head_dim is given",
                        o->path, (long long)c->hidden_size, (long long)c->num_attention_heads);
        c->head_dim = c->hidden_size / c->num_attention_heads;
    }
    if (c->head_dim % 2 != 0)
        return fail(o->message, COLIBRI_ERROR_FORMAT, "%s: head_dim = %lld is odd; rotary embedding turns pairs of channels",
                    o->path, (long long)c->head_dim);
    if (c->head_dim > most / c->num_attention_heads)
        return fail(o->message, COLIBRI_ERROR_FORMAT, "%s: num_attention_heads = %lld times head_dim = %lld is beyond 2^31",
                    o->path, (long long)c->num_attention_heads, (long long)c->head_dim);
    return COLIBRI_OK;
}

static colibri_status read_widths(options *o, const family *f, config *c)
{
    const int64_t most = INT32_MAX;
    if (f->has_dense_layers) {
        TRY(options_integer(o, "intermediate_size", f->intermediate_size, 1, most, &c->intermediate_size));
        TRY(options_integer(o, "moe_intermediate_size", f->moe_intermediate_size, 1, most, &c->moe_intermediate_size));
        bool has_dense = false;
        for (int64_t l = 0; l < c->num_hidden_layers; l++)
            has_dense = has_dense || !c->is_moe[l];
        if (!has_dense)
            c->intermediate_size = 0;
    } else {
        TRY(options_integer(o, "intermediate_size", f->moe_intermediate_size, 1, most, &c->moe_intermediate_size));
    }
    if (f->has_shared_expert)
        TRY(options_integer(o, "shared_expert_intermediate_size", f->shared_expert_intermediate_size, 1, most,
                            &c->shared_expert_intermediate_size));
    return COLIBRI_OK;
}

/* Options that change the arithmetic without being a size. */
static colibri_status read_semantics(options *o, const family *f, config *c)
{
    const char *activation;
    TRY(options_text(o, "hidden_act", "silu", &activation));
    if (strcmp(activation, "silu") != 0 && strcmp(activation, "swish") != 0) /* two names of one function */
        return options_refuse(o, options_find(o, "hidden_act"), COLIBRI_ERROR_UNSUPPORTED,
                              "this activation is not supported; supported is \"silu\"");

    bool renormalise = true, bias = false;
    if (!f->always_renormalises)
        TRY(options_boolean(o, "norm_topk_prob", false, &renormalise));
    c->gate_rule = renormalise ? COLIBRI_GATES_SOFTMAX_RENORMALISED : COLIBRI_GATES_SOFTMAX;
    if (f->bias_key != NULL)
        TRY(options_boolean(o, f->bias_key, f->bias_default, &bias));
    c->qkv_bias = bias;
    c->o_bias = bias && strcmp(f->bias_key, "attention_bias") == 0;

    double eps, clip = 0;
    TRY(options_positive(o, "rms_norm_eps", f->rms_norm_eps, &eps));
    if (f->has_clip_qkv)
        TRY(options_positive(o, "clip_qkv", 0, &clip));
    c->rms_norm_eps = (float)eps;
    c->clip_qkv = (float)clip;
    c->qk_norm = f->qk_norm;
    return options_boolean(o, "tie_word_embeddings", false, &c->tie_word_embeddings);
}

static colibri_status read_fields(options *o, config *c)
{
    const family *f = NULL;
    TRY(read_family(o, &f));
    snprintf(c->model_type, sizeof c->model_type, "%s", f->model_type);
    TRY(options_integer(o, "vocab_size", f->vocab_size, 1, INT32_MAX, &c->vocab_size));
    TRY(options_integer(o, "hidden_size", f->hidden_size, 1, INT32_MAX, &c->hidden_size));
    TRY(options_integer(o, "num_hidden_layers", f->num_hidden_layers, 1, COLIBRI_MAX_LAYERS, &c->num_hidden_layers));
    TRY(options_integer(o, "max_position_embeddings", f->max_position_embeddings, 1, INT32_MAX, &c->max_position_embeddings));
    TRY(read_expert_count(o, f, c));
    TRY(read_heads(o, f, c));
    TRY(config_read_layers(o, f, c));
    TRY(read_widths(o, f, c));
    TRY(read_semantics(o, f, c));
    TRY(config_read_rope(o, f, c));
    return options_finish(o, harmless, sizeof harmless / sizeof *harmless);
}

colibri_status config_read(const char *text, size_t n_bytes, const char *path, config *out, colibri_message *message)
{
    memset(out, 0, sizeof *out);
    const char *kind = foreign_kind((const unsigned char *)text, (int64_t)n_bytes);
    if (kind != NULL)
        return fail(message, COLIBRI_ERROR_FORMAT, "%s is %s", path, kind);
    json document;
    TRY(json_parse(text, n_bytes, path, &document, message));
    options o = {.object = document.nodes, .path = path, .owner = "", .message = message};
    colibri_status status = document.nodes->kind != JSON_OBJECT
                                ? fail(message, COLIBRI_ERROR_FORMAT, "%s must hold a JSON object, not %s", path,
                                       json_kind_name(document.nodes->kind))
                                : read_fields(&o, out);
    json_free(&document);
    return status;
}
