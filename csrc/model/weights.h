/* weights.h: the checkpoint's tensors as matrices under their roles, per layer and expert. Nothing is copied.
 * model.h's owner: a model is config + weights + the mapped files. */
#ifndef COLIBRI_WEIGHTS_H
#define COLIBRI_WEIGHTS_H

#include "../utils/matrix.h"
#include "../utils/status.h"
#include "config.h"

typedef struct ffn_weights {
    matrix gate, up; /* [I, H] */
    matrix down;     /* [H, I] */
} ffn_weights;

typedef struct layer_weights {
    matrix attn_norm, moe_norm;             /* [H]; moe_norm is the norm before the MoE or the dense MLP */
    matrix q, k, v, o;                      /* [heads * head_dim, H] ..., o [H, heads * head_dim] */
    matrix q_bias, k_bias, v_bias, o_bias;  /* absent: data == NULL */
    matrix q_norm, k_norm;                  /* [head_dim] or the whole projection, by config.qk_norm */
    matrix router;                          /* [E, H]; MoE layers */
    ffn_weights *experts;                   /* [E]; NULL in dense layers */
    ffn_weights shared;                     /* gate.data == NULL: none */
    matrix shared_gate;                     /* [1, H] */
    ffn_weights mlp;                        /* dense layers */
} layer_weights;

typedef struct weights {
    matrix embed;   /* [V, H] */
    matrix norm;    /* [H] */
    matrix lm_head; /* [V, H]; the embedding when tied */
    layer_weights *layers; /* [num_hidden_layers] */
} weights;

/* One entry of the public weight table: where a matrix came from. */
typedef struct weight_entry {
    matrix matrix;
    int64_t layer, expert;        /* 0 where the role has none */
    const struct role *role;      /* roles.h */
    const struct tensor *tensor;  /* safetensors.h; a fused tensor serves several entries */
    void *own;                    /* what stands in memory instead of the mapped values; NULL: nothing. Tied entries share it */
} weight_entry;

/* What the engine needs of an opened model; csrc/model/model.c builds it, csrc/api counts its references. */
typedef struct model_data {
    config config;
    weights weights;
    float *inv_freq; /* [head_dim / 2] */
    struct checkpoint *checkpoint; /* mapped files and the tensor table; checkpoint.h */
    weight_entry *entries;         /* [n_entries], in the canonical order */
    size_t n_entries;
    const struct tensor **unused; /* [n_unused]: in the files, and ignored as transformers ignores them */
    size_t n_unused;
} model_data;

colibri_status model_data_open(const char *path, model_data **out, colibri_message *message);
void model_data_free(model_data *m); /* accepts NULL */
colibri_status model_data_check_files(const model_data *m, colibri_message *message);

/* Fills m->weights, m->entries and m->unused from m->checkpoint (weights.c): every tensor that the config asks for must be there, with its
 * shape and in f32, f16 or bf16, and every tensor that is there must be asked for, but for those which transformers ignores. */
colibri_status weights_bind(model_data *m, colibri_message *message);

/* For the public weight table: entry `index` in the canonical order, and how many there are. */
size_t model_data_weight_count(const model_data *m);
colibri_weight model_data_weight(const model_data *m, size_t index);

/* Copies `value` (rows side by side) to memory of its own and puts it in the place of entry `index`, and of the entries that share
 * its values (a tied lm_head). ARGUMENT: another dtype or shape. The mapped file is not touched. */
colibri_status model_data_replace(model_data *m, size_t index, const colibri_array *value, colibri_message *message);
void model_data_free_replaced(model_data *m);

const char *model_data_unused(const model_data *m, size_t index); /* the tensor's name; index < n_unused */

/* For the public field table. */
size_t model_data_field_count(const model_data *m);
colibri_field model_data_field(const model_data *m, size_t index);

#endif
