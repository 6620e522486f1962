#include "taps.h"

#include <stdio.h>
#include <string.h>

#define MODEL COLIBRI_SCOPE_MODEL
#define LAYER COLIBRI_SCOPE_LAYER
#define MOE COLIBRI_SCOPE_MOE
#define SHARED COLIBRI_SCOPE_SHARED
#define DENSE COLIBRI_SCOPE_DENSE
#define EXPERT COLIBRI_SCOPE_EXPERT
#define F32 COLIBRI_F32
#define I32 COLIBRI_I32
#define I64 COLIBRI_I64
#define AT_NONE COLIBRI_LEVEL_NONE
#define AT_ROUTING COLIBRI_LEVEL_ROUTING
#define AT_MOE COLIBRI_LEVEL_MOE
#define AT_ALL COLIBRI_LEVEL_ALL
#define NAMED COLIBRI_LEVEL_NAMED

const colibri_tap_kind tap_kinds[TAP_COUNT] = {
    [TAP_EMBED] = {"embed", MODEL, F32, AT_ALL, "T,H", "token embedding as it enters layer 0"},

    [TAP_ATTN_NORM] = {"layers.{l}.attn.norm", LAYER, F32, AT_ALL, "T,H", "normalised residual that attention reads"},
    [TAP_ATTN_Q] = {"layers.{l}.attn.q", LAYER, F32, AT_ALL, "T,heads,head_dim", "queries after rotation"},
    [TAP_ATTN_K] = {"layers.{l}.attn.k", LAYER, F32, AT_NONE, "T,kv_heads,head_dim", "keys after rotation: the KV cache itself"},
    [TAP_ATTN_V] = {"layers.{l}.attn.v", LAYER, F32, AT_NONE, "T,kv_heads,head_dim", "values: the KV cache itself"},
    [TAP_ATTN_WEIGHTS] = {"layers.{l}.attn.weights", LAYER, F32, NAMED, "heads,T,S", "probabilities; 0 where masked"},
    [TAP_ATTN_OUT] = {"layers.{l}.attn.out", LAYER, F32, AT_ALL, "T,H", "attention after the output projection"},

    [TAP_MOE_INPUT] = {"layers.{l}.moe.input", MOE, F32, AT_MOE, "T,H", "normalised residual that the block reads"},
    [TAP_ROUTER_LOGITS] = {"layers.{l}.moe.router_logits", MOE, F32, AT_ROUTING, "T,E", "router output before any softmax"},
    [TAP_SCORES] = {"layers.{l}.moe.scores", MOE, F32, AT_ROUTING, "T,E", "what the top-k selection compares"},
    [TAP_EXPERT_IDS] = {"layers.{l}.moe.expert_ids", MOE, I32, AT_ROUTING, "T,k", "chosen experts by descending score"},
    [TAP_GATES] = {"layers.{l}.moe.gates", MOE, F32, AT_ROUTING, "T,k", "factors applied to the chosen experts"},
    [TAP_DISPATCH_TOKENS] = {"layers.{l}.moe.dispatch.tokens", MOE, I32, AT_MOE, "N", "token row of each packed row"},
    [TAP_DISPATCH_OFFSETS] = {"layers.{l}.moe.dispatch.offsets", MOE, I64, AT_MOE, "passes,E+1", "first row of each expert"},
    [TAP_DISPATCH_INPUT] = {"layers.{l}.moe.dispatch.input", MOE, F32, AT_MOE, "N,H", "expert inputs, packed by pass and expert"},
    [TAP_DISPATCH_GATE] = {"layers.{l}.moe.dispatch.gate", MOE, F32, AT_ALL, "N,I", "packed gate projections"},
    [TAP_DISPATCH_UP] = {"layers.{l}.moe.dispatch.up", MOE, F32, AT_ALL, "N,I", "packed up projections"},
    [TAP_DISPATCH_HIDDEN] = {"layers.{l}.moe.dispatch.hidden", MOE, F32, AT_ALL, "N,I", "packed act(gate) * up"},
    [TAP_DISPATCH_OUTPUT] = {"layers.{l}.moe.dispatch.output", MOE, F32, AT_MOE, "N,H", "packed outputs before their gates"},
    [TAP_EXPERT_TOKENS] = {"layers.{l}.moe.experts.{e}.tokens", EXPERT, I32, AT_MOE, "n_e", "rows of the tokens sent here"},
    [TAP_EXPERT_INPUT] = {"layers.{l}.moe.experts.{e}.input", EXPERT, F32, AT_MOE, "n_e,H", "gathered rows it reads"},
    [TAP_EXPERT_GATE] = {"layers.{l}.moe.experts.{e}.gate", EXPERT, F32, AT_ALL, "n_e,I", "gate projection"},
    [TAP_EXPERT_UP] = {"layers.{l}.moe.experts.{e}.up", EXPERT, F32, AT_ALL, "n_e,I", "up projection"},
    [TAP_EXPERT_HIDDEN] = {"layers.{l}.moe.experts.{e}.hidden", EXPERT, F32, AT_ALL, "n_e,I", "act(gate) * up"},
    [TAP_EXPERT_OUTPUT] = {"layers.{l}.moe.experts.{e}.output", EXPERT, F32, AT_MOE, "n_e,H", "expert output before its gate"},
    [TAP_MOE_ROUTED] = {"layers.{l}.moe.routed", MOE, F32, AT_MOE, "T,H", "gated sum of the chosen experts"},
    [TAP_SHARED_OUTPUT] = {"layers.{l}.moe.shared.output", SHARED, F32, AT_MOE, "T,H", "shared expert before its gate"},
    [TAP_SHARED_GATE] = {"layers.{l}.moe.shared.gate", SHARED, F32, AT_MOE, "T,1", "factor applied to the shared expert"},
    [TAP_MOE_OUTPUT] = {"layers.{l}.moe.output", MOE, F32, AT_MOE, "T,H", "what the MoE block adds to the residual"},

    [TAP_MLP_INPUT] = {"layers.{l}.mlp.input", DENSE, F32, AT_ALL, "T,H", "normalised residual that a dense layer reads"},
    [TAP_MLP_OUTPUT] = {"layers.{l}.mlp.output", DENSE, F32, AT_ALL, "T,H", "what a dense layer adds to the residual"},
    [TAP_OUTPUT] = {"layers.{l}.output", LAYER, F32, AT_ALL, "T,H", "residual stream after the layer"},

    [TAP_NORM] = {"norm", MODEL, F32, AT_ALL, "T,H", "residual stream after the final norm"},
    [TAP_LOGITS] = {"logits", MODEL, F32, AT_ALL, "T,V", "next-token logits"},
};

tap_rows tap_rows_of(tap t)
{
    switch (tap_kinds[t].axes[0]) {
    case 'N': return ROWS_PACKED;
    case 'p': return ROWS_PASSES;
    case 'n': return ROWS_OF_EXPERT;
    case 'h': return ROWS_HEADS;
    default: return ROWS_TOKENS;
    }
}

static int64_t axis_size(const config *c, const char *axis, size_t length)
{
    const struct {
        const char *name;
        int64_t size;
    } axes[] = {
        {"H", c->hidden_size},
        {"V", c->vocab_size},
        {"E", c->num_experts},
        {"E+1", c->num_experts + 1},
        {"k", c->top_k},
        {"I", c->moe_intermediate_size},
        {"heads", c->num_attention_heads},
        {"kv_heads", c->num_key_value_heads},
        {"head_dim", c->head_dim},
    };
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        if (strlen(axes[i].name) == length && memcmp(axes[i].name, axis, length) == 0)
            return axes[i].size;
    return 1; /* the axis named "1" */
}

int tap_row_shape(const config *c, tap t, int64_t shape[COLIBRI_MAX_DIMS - 1])
{
    int n = 0;
    const char *comma = strchr(tap_kinds[t].axes, ',');
    while (comma != NULL) {
        const char *axis = comma + 1;
        comma = strchr(axis, ',');
        shape[n++] = axis_size(c, axis, comma != NULL ? (size_t)(comma - axis) : strlen(axis));
    }
    return n;
}

int64_t tap_row_bytes(const config *c, tap t)
{
    int64_t shape[COLIBRI_MAX_DIMS - 1];
    int64_t bytes = (int64_t)colibri_dtype_size(tap_kinds[t].dtype);
    int n = tap_row_shape(c, t, shape);
    for (int i = 0; i < n; i++)
        bytes *= shape[i];
    return bytes;
}

bool tap_exists(const config *c, tap t, int64_t layer)
{
    switch (tap_kinds[t].scope) {
    case COLIBRI_SCOPE_MOE:
    case COLIBRI_SCOPE_EXPERT: return c->is_moe[layer];
    case COLIBRI_SCOPE_SHARED: return c->is_moe[layer] && c->shared_expert_intermediate_size > 0;
    case COLIBRI_SCOPE_DENSE: return !c->is_moe[layer];
    default: return true;
    }
}

tap tap_storage(const config *c, tap t)
{
    switch (t) {
    case TAP_EXPERT_TOKENS: return TAP_DISPATCH_TOKENS;
    case TAP_EXPERT_INPUT: return TAP_DISPATCH_INPUT;
    case TAP_EXPERT_GATE: return TAP_DISPATCH_GATE;
    case TAP_EXPERT_UP: return TAP_DISPATCH_UP;
    case TAP_EXPERT_HIDDEN: return TAP_DISPATCH_HIDDEN;
    case TAP_EXPERT_OUTPUT: return TAP_DISPATCH_OUTPUT;
    case TAP_MOE_OUTPUT: return c->shared_expert_intermediate_size > 0 ? TAP_MOE_OUTPUT : TAP_MOE_ROUTED;
    default: return t;
    }
}

void path_fill(const char *path, int64_t layer, int64_t expert, char out[TAP_PATH_SIZE])
{
    size_t n = 0;
    for (const char *p = path; *p != '\0' && n + 24 < TAP_PATH_SIZE; p++) {
        if (*p != '{') {
            out[n++] = *p;
            continue;
        }
        int64_t number = p[1] == 'l' ? layer : expert;
        if (number < 0)
            out[n++] = '*';
        else
            n += (size_t)snprintf(out + n, TAP_PATH_SIZE - n, "%lld", (long long)number);
        p += 2; /* past "l}" */
    }
    out[n] = '\0';
}

void tap_path(tap t, int64_t layer, int64_t expert, char out[TAP_PATH_SIZE])
{
    path_fill(tap_kinds[t].path, layer, expert, out);
}
