#include "roles.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

static bool has_qkv_bias(const config *c, int64_t layer) { (void)layer; return c->qkv_bias; }
static bool has_o_bias(const config *c, int64_t layer) { (void)layer; return c->o_bias; }
static bool has_head_norm(const config *c, int64_t layer) { (void)layer; return c->qk_norm == QK_NORM_HEAD; }
static bool has_full_norm(const config *c, int64_t layer) { (void)layer; return c->qk_norm == QK_NORM_FULL; }
static bool is_moe(const config *c, int64_t layer) { return c->is_moe[layer]; }
static bool is_dense(const config *c, int64_t layer) { return !c->is_moe[layer]; }
static bool has_shared(const config *c, int64_t layer) { return c->is_moe[layer] && c->shared_expert_intermediate_size > 0; }

#define MODEL(field) offsetof(weights, field)
#define LAYER(field) offsetof(layer_weights, field)
#define FFN(field) offsetof(ffn_weights, field)
#define ATTENTION "model.layers.{l}.self_attn."
#define MLP "model.layers.{l}.mlp."

/* In the order in which model.weights iterates. A bias follows its matrix; gate, up and down of an expert follow each other. */
const role roles[] = {
    {"embed", "model.embed_tokens.weight", ROLE_MODEL, SIDE_VOCAB, SIDE_HIDDEN, MODEL(embed), NULL, false},
    {"norm", "model.norm.weight", ROLE_MODEL, SIDE_ONE, SIDE_HIDDEN, MODEL(norm), NULL, true},
    {"lm_head", "lm_head.weight", ROLE_MODEL, SIDE_VOCAB, SIDE_HIDDEN, MODEL(lm_head), NULL, false},
    {"layers.{l}.attn.q", ATTENTION "q_proj.weight", ROLE_LAYER, SIDE_QUERY, SIDE_HIDDEN, LAYER(q), NULL, false},
    {"layers.{l}.attn.q.bias", ATTENTION "q_proj.bias", ROLE_LAYER, SIDE_ONE, SIDE_QUERY, LAYER(q_bias), has_qkv_bias, true},
    {"layers.{l}.attn.k", ATTENTION "k_proj.weight", ROLE_LAYER, SIDE_KEY, SIDE_HIDDEN, LAYER(k), NULL, false},
    {"layers.{l}.attn.k.bias", ATTENTION "k_proj.bias", ROLE_LAYER, SIDE_ONE, SIDE_KEY, LAYER(k_bias), has_qkv_bias, true},
    {"layers.{l}.attn.v", ATTENTION "v_proj.weight", ROLE_LAYER, SIDE_KEY, SIDE_HIDDEN, LAYER(v), NULL, false},
    {"layers.{l}.attn.v.bias", ATTENTION "v_proj.bias", ROLE_LAYER, SIDE_ONE, SIDE_KEY, LAYER(v_bias), has_qkv_bias, true},
    {"layers.{l}.attn.o", ATTENTION "o_proj.weight", ROLE_LAYER, SIDE_HIDDEN, SIDE_QUERY, LAYER(o), NULL, false},
    {"layers.{l}.attn.o.bias", ATTENTION "o_proj.bias", ROLE_LAYER, SIDE_ONE, SIDE_HIDDEN, LAYER(o_bias), has_o_bias, true},
    {"layers.{l}.attn.q_norm", ATTENTION "q_norm.weight", ROLE_LAYER, SIDE_ONE, SIDE_HEAD, LAYER(q_norm), has_head_norm, true},
    {"layers.{l}.attn.k_norm", ATTENTION "k_norm.weight", ROLE_LAYER, SIDE_ONE, SIDE_HEAD, LAYER(k_norm), has_head_norm, true},
    {"layers.{l}.attn.q_norm", ATTENTION "q_norm.weight", ROLE_LAYER, SIDE_ONE, SIDE_QUERY, LAYER(q_norm), has_full_norm, true},
    {"layers.{l}.attn.k_norm", ATTENTION "k_norm.weight", ROLE_LAYER, SIDE_ONE, SIDE_KEY, LAYER(k_norm), has_full_norm, true},
    {"layers.{l}.attn_norm", "model.layers.{l}.input_layernorm.weight",
     ROLE_LAYER, SIDE_ONE, SIDE_HIDDEN, LAYER(attn_norm), NULL, true},
    {"layers.{l}.moe_norm", "model.layers.{l}.post_attention_layernorm.weight",
     ROLE_LAYER, SIDE_ONE, SIDE_HIDDEN, LAYER(moe_norm), NULL, true},
    {"layers.{l}.moe.router", "{moe}.gate.weight", ROLE_LAYER, SIDE_EXPERTS, SIDE_HIDDEN, LAYER(router), is_moe, false},
    {"layers.{l}.moe.experts.{e}.gate", "{moe}.experts.{e}.{gate}.weight",
     ROLE_EXPERT, SIDE_EXPERT, SIDE_HIDDEN, FFN(gate), is_moe, false},
    {"layers.{l}.moe.experts.{e}.up", "{moe}.experts.{e}.{up}.weight",
     ROLE_EXPERT, SIDE_EXPERT, SIDE_HIDDEN, FFN(up), is_moe, false},
    {"layers.{l}.moe.experts.{e}.down", "{moe}.experts.{e}.{down}.weight",
     ROLE_EXPERT, SIDE_HIDDEN, SIDE_EXPERT, FFN(down), is_moe, false},
    {"layers.{l}.moe.shared.gate", MLP "shared_expert.gate_proj.weight",
     ROLE_LAYER, SIDE_SHARED, SIDE_HIDDEN, LAYER(shared.gate), has_shared, false},
    {"layers.{l}.moe.shared.up", MLP "shared_expert.up_proj.weight",
     ROLE_LAYER, SIDE_SHARED, SIDE_HIDDEN, LAYER(shared.up), has_shared, false},
    {"layers.{l}.moe.shared.down", MLP "shared_expert.down_proj.weight",
     ROLE_LAYER, SIDE_HIDDEN, SIDE_SHARED, LAYER(shared.down), has_shared, false},
    {"layers.{l}.moe.shared_gate", MLP "shared_expert_gate.weight",
     ROLE_LAYER, SIDE_ONE, SIDE_HIDDEN, LAYER(shared_gate), has_shared, false},
    {"layers.{l}.mlp.gate", MLP "gate_proj.weight", ROLE_LAYER, SIDE_DENSE, SIDE_HIDDEN, LAYER(mlp.gate), is_dense, false},
    {"layers.{l}.mlp.up", MLP "up_proj.weight", ROLE_LAYER, SIDE_DENSE, SIDE_HIDDEN, LAYER(mlp.up), is_dense, false},
    {"layers.{l}.mlp.down", MLP "down_proj.weight", ROLE_LAYER, SIDE_HIDDEN, SIDE_DENSE, LAYER(mlp.down), is_dense, false},
};
const size_t role_count = sizeof roles / sizeof *roles;

int64_t side_size(side s, const config *c)
{
    switch (s) {
    case SIDE_ONE: return 1;
    case SIDE_VOCAB: return c->vocab_size;
    case SIDE_HIDDEN: return c->hidden_size;
    case SIDE_QUERY: return c->num_attention_heads * c->head_dim;
    case SIDE_KEY: return c->num_key_value_heads * c->head_dim;
    case SIDE_HEAD: return c->head_dim;
    case SIDE_EXPERTS: return c->num_experts;
    case SIDE_EXPERT: return c->moe_intermediate_size;
    case SIDE_SHARED: return c->shared_expert_intermediate_size;
    case SIDE_DENSE: return c->intermediate_size;
    }
    return 0;
}

const char *side_label(side s)
{
    static const char *const labels[] = {
        "1", "vocab_size", "hidden_size", "num_attention_heads * head_dim", "num_key_value_heads * head_dim", "head_dim",
        "num_experts", "intermediate_size of an expert", "shared_expert_intermediate_size", "intermediate_size"};
    return labels[s];
}

char *role_name(const char *pattern, const spelling *s, int64_t layer, int64_t expert, char *buffer, size_t n_bytes)
{
    size_t n = 0;
    while (*pattern != '\0' && n + 1 < n_bytes) {
        if (*pattern != '{') {
            buffer[n++] = *pattern++;
            continue;
        }
        size_t room = n_bytes - n;
        int written = 0;
        switch (pattern[1]) {
        case 'l': written = snprintf(buffer + n, room, "%lld", (long long)layer); break;
        case 'e': written = snprintf(buffer + n, room, "%lld", (long long)expert); break;
        case 'm': written = snprintf(buffer + n, room, "model.layers.%lld.%s", (long long)layer, s->moe); break;
        case 'g': written = snprintf(buffer + n, room, "%s", s->gate); break;
        case 'u': written = snprintf(buffer + n, room, "%s", s->up); break;
        case 'd': written = snprintf(buffer + n, room, "%s", s->down); break;
        }
        n += (size_t)written < room ? (size_t)written : room - 1;
        pattern = strchr(pattern, '}') + 1;
    }
    buffer[n] = '\0';
    return buffer;
}
