/* roles.h: every weight a model can have, as one table: its canonical name, its name in a checkpoint, its shape in terms of the
 * config, and its place in the weights structure. weights.c walks the table; a new weight is a new row. */
#ifndef COLIBRI_MODEL_ROLES_H
#define COLIBRI_MODEL_ROLES_H

#include "weights.h"

/* A side of a weight's shape. */
typedef enum side {
    SIDE_ONE = 0, SIDE_VOCAB, SIDE_HIDDEN, SIDE_QUERY, SIDE_KEY, SIDE_HEAD, SIDE_EXPERTS, SIDE_EXPERT, SIDE_SHARED, SIDE_DENSE
} side;

/* Of which structure a role's offset counts, and so how often it occurs: weights, layer_weights, or ffn_weights of an expert. */
typedef enum role_scope { ROLE_MODEL = 0, ROLE_LAYER, ROLE_EXPERT } role_scope;

typedef struct role {
    const char *name;   /* pattern: {l} layer, {e} expert */
    const char *tensor; /* pattern: also {moe}, {gate}, {up}, {down}, which depend on how the checkpoint spells its experts */
    role_scope scope;
    side rows, cols;
    size_t offset;
    bool (*present)(const config *c, int64_t layer); /* NULL: always */
    bool is_vector; /* stored with one dimension, [cols] */
} role;

extern const role roles[];
extern const size_t role_count;

/* How a checkpoint spells the experts of one layer. */
typedef struct spelling {
    const char *moe;            /* "mlp" or "block_sparse_moe" */
    const char *gate, *up, *down; /* "gate_proj" ... or "w1", "w3", "w2" */
} spelling;

int64_t side_size(side s, const config *c);
const char *side_label(side s); /* in the config's words */
/* Fills a pattern in. Returns buffer. */
char *role_name(const char *pattern, const spelling *s, int64_t layer, int64_t expert, char *buffer, size_t n_bytes);

#endif
