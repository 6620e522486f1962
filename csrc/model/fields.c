/* fields.c: the effective configuration as a table, for people and for bindings. What is off is None. */
#include "weights.h"

typedef colibri_field (*field_value)(const config *c);

static colibri_field none(void) { return (colibri_field){.kind = COLIBRI_FIELD_NONE}; }
static colibri_field integer(int64_t value) { return (colibri_field){.kind = COLIBRI_FIELD_INTEGER, .integer = value}; }
static colibri_field size_or_none(int64_t value) { return value > 0 ? integer(value) : none(); }
static colibri_field real(double value) { return (colibri_field){.kind = COLIBRI_FIELD_REAL, .real = value}; }
static colibri_field boolean(bool value) { return (colibri_field){.kind = COLIBRI_FIELD_BOOLEAN, .integer = value}; }
static colibri_field text(const char *value) { return (colibri_field){.kind = COLIBRI_FIELD_TEXT, .text = value}; }

/* A float32 option as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06. */
static colibri_field real32(float value)
{
    double scale = 1;
    for (int digits = 0; digits < 12; digits++, scale *= 10) {
        double scaled = (double)value * scale;
        int64_t rounded = scaled < 9e15 ? (int64_t)(scaled + 0.5) : 0;
        if (rounded > 0 && (float)((double)rounded / scale) == value)
            return real((double)rounded / scale);
    }
    return real((double)value);
}

static colibri_field model_type(const config *c) { return text(c->model_type); }
static colibri_field vocab_size(const config *c) { return integer(c->vocab_size); }
static colibri_field hidden_size(const config *c) { return integer(c->hidden_size); }
static colibri_field num_hidden_layers(const config *c) { return integer(c->num_hidden_layers); }
static colibri_field num_attention_heads(const config *c) { return integer(c->num_attention_heads); }
static colibri_field num_key_value_heads(const config *c) { return integer(c->num_key_value_heads); }
static colibri_field head_dim(const config *c) { return integer(c->head_dim); }
static colibri_field max_position_embeddings(const config *c) { return integer(c->max_position_embeddings); }
static colibri_field intermediate_size(const config *c) { return size_or_none(c->intermediate_size); }
static colibri_field moe_intermediate_size(const config *c) { return integer(c->moe_intermediate_size); }
static colibri_field shared_expert_intermediate_size(const config *c) { return size_or_none(c->shared_expert_intermediate_size); }
static colibri_field num_experts(const config *c) { return integer(c->num_experts); }
static colibri_field top_k(const config *c) { return integer(c->top_k); }
static colibri_field gate_rule(const config *c) { return text(gate_mode_name(c->gate_rule)); }
static colibri_field hidden_act(const config *c) { (void)c; return text("silu"); }
static colibri_field rms_norm_eps(const config *c) { return real32(c->rms_norm_eps); }

static colibri_field qk_norm_name(const config *c)
{
    static const char *const names[] = {"none", "head", "full"};
    return text(names[c->qk_norm]);
}

static colibri_field clip_qkv(const config *c) { return c->clip_qkv > 0 ? real32(c->clip_qkv) : none(); }
static colibri_field qkv_bias(const config *c) { return boolean(c->qkv_bias); }
static colibri_field o_bias(const config *c) { return boolean(c->o_bias); }
static colibri_field tie_word_embeddings(const config *c) { return boolean(c->tie_word_embeddings); }

static colibri_field sliding_window(const config *c)
{
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        if (c->window[l] > 0)
            return integer(c->window[l]);
    return none();
}

static colibri_field num_moe_layers(const config *c)
{
    int64_t n = 0;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        n += c->is_moe[l];
    return integer(n);
}

static bool is_type(const config *c, rope_type type) { return c->rope.type == type; }
static colibri_field rope_type_field(const config *c) { return text(rope_type_name(c->rope.type)); }
static colibri_field rope_theta(const config *c) { return real(c->rope.theta); }
static colibri_field rope_factor(const config *c) { return is_type(c, ROPE_DEFAULT) ? none() : real(c->rope.factor); }
static colibri_field rope_low(const config *c) { return is_type(c, ROPE_LLAMA3) ? real(c->rope.low_freq_factor) : none(); }
static colibri_field rope_high(const config *c) { return is_type(c, ROPE_LLAMA3) ? real(c->rope.high_freq_factor) : none(); }
static colibri_field rope_beta_fast(const config *c) { return is_type(c, ROPE_YARN) ? real(c->rope.beta_fast) : none(); }
static colibri_field rope_beta_slow(const config *c) { return is_type(c, ROPE_YARN) ? real(c->rope.beta_slow) : none(); }
static colibri_field rope_truncate(const config *c) { return is_type(c, ROPE_YARN) ? boolean(c->rope.truncate) : none(); }
static colibri_field rope_attention_factor(const config *c) { return real(c->rope.attention_factor); }
static colibri_field rope_original(const config *c) { return size_or_none(c->rope.original_max_position_embeddings); }

static const struct {
    const char *name;
    field_value value;
} fields[] = {
    {"model_type", model_type},
    {"vocab_size", vocab_size},
    {"hidden_size", hidden_size},
    {"num_hidden_layers", num_hidden_layers},
    {"num_moe_layers", num_moe_layers},
    {"num_attention_heads", num_attention_heads},
    {"num_key_value_heads", num_key_value_heads},
    {"head_dim", head_dim},
    {"intermediate_size", intermediate_size},
    {"moe_intermediate_size", moe_intermediate_size},
    {"shared_expert_intermediate_size", shared_expert_intermediate_size},
    {"num_experts", num_experts},
    {"top_k", top_k},
    {"gate_rule", gate_rule},
    {"hidden_act", hidden_act},
    {"rms_norm_eps", rms_norm_eps},
    {"qk_norm", qk_norm_name},
    {"clip_qkv", clip_qkv},
    {"qkv_bias", qkv_bias},
    {"o_bias", o_bias},
    {"tie_word_embeddings", tie_word_embeddings},
    {"max_position_embeddings", max_position_embeddings},
    {"sliding_window", sliding_window},
    {"rope_type", rope_type_field},
    {"rope_theta", rope_theta},
    {"rope_factor", rope_factor},
    {"rope_low_freq_factor", rope_low},
    {"rope_high_freq_factor", rope_high},
    {"rope_beta_fast", rope_beta_fast},
    {"rope_beta_slow", rope_beta_slow},
    {"rope_truncate", rope_truncate},
    {"rope_original_max_position_embeddings", rope_original},
    {"rope_attention_factor", rope_attention_factor},
};

size_t model_data_field_count(const model_data *m)
{
    (void)m;
    return sizeof fields / sizeof *fields;
}

colibri_field model_data_field(const model_data *m, size_t index)
{
    colibri_field field = fields[index].value(&m->config);
    field.name = fields[index].name;
    return field;
}
