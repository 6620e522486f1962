/* weights.c: from tensor names to matrices. The table of roles says what a model must have; each tensor is looked up once. */
#include "weights.h"

#include "checkpoint.h"
#include "roles.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAMED_MISSING = 6,    /* names that a message lists */
    MOST_MISSING = 10000, /* missing tensors after which no further layer is looked at: the files are not this config's */
};

typedef struct binder {
    model_data *m;
    bool *used;          /* [n_tensors]: asked for */
    size_t n_wanted, n_missing;
    char missing[1024];  /* the first few names */
    colibri_message *message;
} binder;

static const spelling hub_spelling = {"mlp", "gate_proj", "up_proj", "down_proj"};
static const spelling mixtral_spelling = {"block_sparse_moe", "w1", "w3", "w2"};

/* ---- one tensor ---- */

static colibri_status read_dtype(const binder *b, const tensor *t, colibri_dtype *out)
{
    static const char *const names[] = {"F32", "F16", "BF16"};
    static const colibri_dtype dtypes[] = {COLIBRI_F32, COLIBRI_F16, COLIBRI_BF16};
    for (int i = 0; i < 3; i++) {
        if (strcmp(t->dtype, names[i]) == 0) {
            *out = dtypes[i];
            return COLIBRI_OK;
        }
    }
    return fail(b->message, COLIBRI_ERROR_UNSUPPORTED,
                "%s: tensor \"%.200s\" has dtype %s, which is not supported; supported are F32, F16 and BF16",
                checkpoint_file_path(b->m->checkpoint, t), t->name, t->dtype);
}

static const tensor *find(binder *b, const char *name)
{
    const tensor *t = checkpoint_find(b->m->checkpoint, name);
    b->n_wanted++;
    if (t != NULL) {
        b->used[t - b->m->checkpoint->tensors] = true;
        return t;
    }
    size_t length = strlen(b->missing);
    if (b->n_missing++ < NAMED_MISSING)
        snprintf(b->missing + length, sizeof b->missing - length, "%s%s", length == 0 ? "" : ", ", name);
    return NULL;
}

static colibri_status check_shape(const binder *b, const tensor *t, const int64_t *shape, int n_dims, const char *labels)
{
    bool same = t->n_dims == n_dims;
    for (int i = 0; i < n_dims && same; i++)
        same = t->shape[i] == shape[i];
    if (same)
        return COLIBRI_OK;
    char is[200], wanted[100];
    return fail(b->message, COLIBRI_ERROR_FORMAT, "%s: tensor \"%.200s\" has shape %s; config.json asks for %s (%s)",
                checkpoint_file_path(b->m->checkpoint, t), t->name, shape_show(t->shape, t->n_dims, is, sizeof is),
                shape_show(shape, n_dims, wanted, sizeof wanted), labels);
}

static void *role_place(const model_data *m, const role *r, int64_t layer, int64_t expert)
{
    unsigned char *base = r->scope == ROLE_MODEL   ? (unsigned char *)&m->weights
                          : r->scope == ROLE_LAYER ? (unsigned char *)&m->weights.layers[layer]
                                                   : (unsigned char *)&m->weights.layers[layer].experts[expert];
    return base + r->offset;
}

static void add_entry(binder *b, const role *r, int64_t layer, int64_t expert, const tensor *t, matrix value)
{
    memcpy(role_place(b->m, r, layer, expert), &value, sizeof value);
    b->m->entries[b->m->n_entries++] = (weight_entry){value, layer, expert, r, t, NULL};
}

/* `tied` stands in for a missing lm_head; else NULL. */
static colibri_status bind_role(binder *b, const role *r, const spelling *s, int64_t layer, int64_t expert, const char *tied)
{
    char name[160], labels[120];
    role_name(r->tensor, s, layer, expert, name, sizeof name);
    if (tied != NULL && checkpoint_find(b->m->checkpoint, name) == NULL)
        snprintf(name, sizeof name, "%s", tied);
    const tensor *t = find(b, name);
    if (t == NULL)
        return COLIBRI_OK; /* all missing tensors are named together */
    int64_t shape[2] = {side_size(r->rows, &b->m->config), side_size(r->cols, &b->m->config)};
    if (r->is_vector)
        snprintf(labels, sizeof labels, "%s", side_label(r->cols));
    else
        snprintf(labels, sizeof labels, "%s, %s", side_label(r->rows), side_label(r->cols));
    TRY(check_shape(b, t, r->is_vector ? shape + 1 : shape, r->is_vector ? 1 : 2, labels));
    colibri_dtype dtype = COLIBRI_F32;
    TRY(read_dtype(b, t, &dtype));
    add_entry(b, r, layer, expert, t, (matrix){t->data, dtype, shape[0], shape[1]});
    return COLIBRI_OK;
}

/* ---- experts ---- */

/* A checkpoint of the mixtral family names its module block_sparse_moe, or mlp when saved as newer releases hold it. */
static spelling layer_spelling(const binder *b, int64_t layer)
{
    char name[160];
    bool mixtral = strcmp(b->m->config.model_type, "mixtral") == 0;
    spelling s = mixtral ? mixtral_spelling : hub_spelling;
    role_name("{moe}.gate.weight", &s, layer, 0, name, sizeof name);
    if (mixtral && checkpoint_find(b->m->checkpoint, name) == NULL) {
        spelling other = s;
        other.moe = hub_spelling.moe;
        role_name("{moe}.gate.weight", &other, layer, 0, name, sizeof name);
        s = checkpoint_find(b->m->checkpoint, name) != NULL ? other : s;
    }
    return s;
}

/* Matrix e of a fused tensor [E, rows, cols], `skip` rows in: a slice in place. */
static matrix fused_slice(const tensor *t, colibri_dtype dtype, int64_t expert, int64_t skip, int64_t rows)
{
    int64_t cols = t->shape[2];
    int64_t first = (expert * t->shape[1] + skip) * cols;
    return (matrix){(const unsigned char *)t->data + first * (int64_t)colibri_dtype_size(dtype), dtype, rows, cols};
}

/* gate_up_proj [E, 2I, H], gate rows first, and down_proj [E, H, I]. The roles of an expert follow each other in the
 * role table. */
static colibri_status bind_fused(binder *b, const role *gate, const spelling *s, int64_t layer)
{
    const config *c = &b->m->config;
    int64_t n_experts = c->num_experts, width = c->moe_intermediate_size, hidden = c->hidden_size;
    const int64_t gate_up_shape[3] = {n_experts, 2 * width, hidden}, down_shape[3] = {n_experts, hidden, width};
    char name[160];
    const tensor *gate_up = find(b, role_name("{moe}.experts.gate_up_proj", s, layer, 0, name, sizeof name));
    const tensor *down = find(b, role_name("{moe}.experts.down_proj", s, layer, 0, name, sizeof name));
    if (gate_up == NULL || down == NULL)
        return COLIBRI_OK;
    colibri_dtype gate_up_dtype = COLIBRI_F32, down_dtype = COLIBRI_F32;
    TRY(check_shape(b, gate_up, gate_up_shape, 3, "num_experts, 2 * intermediate_size of an expert, hidden_size"));
    TRY(check_shape(b, down, down_shape, 3, "num_experts, hidden_size, intermediate_size of an expert"));
    TRY(read_dtype(b, gate_up, &gate_up_dtype));
    TRY(read_dtype(b, down, &down_dtype));
    for (int64_t e = 0; e < n_experts; e++) {
        add_entry(b, gate, layer, e, gate_up, fused_slice(gate_up, gate_up_dtype, e, 0, width));
        add_entry(b, gate + 1, layer, e, gate_up, fused_slice(gate_up, gate_up_dtype, e, width, width));
        add_entry(b, gate + 2, layer, e, down, fused_slice(down, down_dtype, e, 0, hidden));
    }
    return COLIBRI_OK;
}

static colibri_status bind_experts(binder *b, const role *gate, const spelling *s, int64_t layer)
{
    char name[160];
    if (checkpoint_find(b->m->checkpoint, role_name("{moe}.experts.gate_up_proj", s, layer, 0, name, sizeof name)) != NULL)
        return bind_fused(b, gate, s, layer);
    for (int64_t e = 0; e < b->m->config.num_experts; e++)
        for (int i = 0; i < 3; i++)
            TRY(bind_role(b, gate + i, s, layer, e, NULL));
    return COLIBRI_OK;
}

/* ---- the walk ---- */

static colibri_status bind_layer(binder *b, int64_t layer)
{
    const config *c = &b->m->config;
    spelling s = layer_spelling(b, layer);
    for (size_t i = 0; i < role_count; i++) {
        const role *r = &roles[i];
        if (r->scope == ROLE_MODEL || (r->present != NULL && !r->present(c, layer)))
            continue;
        if (r->scope == ROLE_LAYER) {
            TRY(bind_role(b, r, &s, layer, 0, NULL));
            continue;
        }
        TRY(bind_experts(b, r, &s, layer));
        i += 2; /* gate, up and down were bound together */
    }
    return COLIBRI_OK;
}

static colibri_status refuse_missing(const binder *b)
{
    const model_data *m = b->m;
    bool untied = b->n_missing == 1 && m->weights.embed.data != NULL && m->weights.lm_head.data == NULL;
    bool is_shard = m->checkpoint->n_files == 1 && strstr(m->checkpoint->files[0].map.path, "-of-") != NULL;
    return fail(b->message, COLIBRI_ERROR_FORMAT, "%s: loaded %zu of %zu tensors; missing: %s%s%s", m->checkpoint->folder,
                b->n_wanted - b->n_missing, b->n_wanted, b->missing, b->n_missing > NAMED_MISSING ? ", ..." : "",
                untied     ? " (tie_word_embeddings is false, so the embedding may not take its place)"
                : is_shard ? " (this file is one shard of several: open its folder)"
                           : "");
}

static colibri_status bind_all(binder *b)
{
    const model_data *m = b->m;
    const char *tied = m->config.tie_word_embeddings ? "model.embed_tokens.weight" : NULL;
    for (size_t i = 0; i < role_count; i++)
        if (roles[i].scope == ROLE_MODEL)
            TRY(bind_role(b, &roles[i], &hub_spelling, 0, 0, strcmp(roles[i].name, "lm_head") == 0 ? tied : NULL));
    for (int64_t l = 0; l < m->config.num_hidden_layers && b->n_missing < MOST_MISSING; l++)
        TRY(bind_layer(b, l));
    return b->n_missing == 0 ? COLIBRI_OK : refuse_missing(b);
}

/* ---- tensors that nobody asked for ---- */

/* Layers behind the last (multi-token prediction heads) and recomputed tables are ignored by the reference too. */
static bool is_ignored(const config *c, const char *name)
{
    static const char layers[] = "model.layers.", table[] = "rotary_emb.inv_freq";
    size_t length = strlen(name);
    if (strncmp(name, "mtp.", 4) == 0 || (length >= sizeof table - 1 && strcmp(name + length - (sizeof table - 1), table) == 0))
        return true;
    if (strncmp(name, layers, sizeof layers - 1) != 0)
        return false;
    const char *number = name + sizeof layers - 1, *end = number;
    int64_t layer = 0;
    while (*end >= '0' && *end <= '9' && layer <= COLIBRI_MAX_LAYERS)
        layer = layer * 10 + (*end++ - '0');
    bool canonical = end > number && *end == '.' && (*number != '0' || end == number + 1);
    return canonical && layer >= c->num_hidden_layers;
}

/* Notes the tensors that the reference ignores too; any other that nobody asked for is refused. */
static colibri_status sort_unused(const binder *b)
{
    const checkpoint *c = b->m->checkpoint;
    for (int64_t i = 0; i < c->n_tensors; i++) {
        const tensor *t = &c->tensors[i];
        size_t length = strlen(t->name);
        if (b->used[i])
            continue;
        if (is_ignored(&b->m->config, t->name)) {
            b->m->unused[b->m->n_unused++] = t;
            continue;
        }
        bool is_bias = length > 5 && strcmp(t->name + length - 5, ".bias") == 0, is_scale = strstr(t->name, "scale") != NULL;
        return fail(b->message, is_scale ? COLIBRI_ERROR_UNSUPPORTED : COLIBRI_ERROR_FORMAT,
                    "%s: tensor \"%.200s\" has no place in a %s model with this config.json%s", checkpoint_file_path(c, t),
                    t->name, b->m->config.model_type,
                    is_bias    ? " (by which this projection has no bias)"
                    : is_scale ? " (quantised weights are not supported; supported are F32, F16 and BF16)"
                               : "");
    }
    return COLIBRI_OK;
}

/* Rows of the weight table at most: all roles in every layer, and three per expert. */
static size_t most_entries(const config *c)
{
    size_t experts = 0;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        experts += c->is_moe[l] ? (size_t)c->num_experts : 0;
    return role_count * (size_t)(c->num_hidden_layers + 1) + 3 * experts;
}

static colibri_status allocate(binder *b)
{
    model_data *m = b->m;
    const config *c = &m->config;
    m->weights.layers = calloc((size_t)c->num_hidden_layers, sizeof *m->weights.layers);
    m->entries = malloc(most_entries(c) * sizeof *m->entries);
    b->used = calloc((size_t)m->checkpoint->n_tensors + 1, sizeof *b->used);
    m->unused = malloc(((size_t)m->checkpoint->n_tensors + 1) * sizeof *m->unused);
    bool complete = m->weights.layers != NULL && m->entries != NULL && b->used != NULL && m->unused != NULL;
    for (int64_t l = 0; l < c->num_hidden_layers && complete; l++) {
        if (c->is_moe[l]) {
            m->weights.layers[l].experts = calloc((size_t)c->num_experts, sizeof(ffn_weights));
            complete = m->weights.layers[l].experts != NULL;
        }
    }
    return complete ? COLIBRI_OK
                    : fail(b->message, COLIBRI_ERROR_MEMORY, "%s: no memory for the table of its weights", m->checkpoint->folder);
}

colibri_status weights_bind(model_data *m, colibri_message *message)
{
    binder b = {.m = m, .message = message};
    colibri_status status = allocate(&b);
    if (status == COLIBRI_OK)
        status = bind_all(&b);
    if (status == COLIBRI_OK)
        status = sort_unused(&b);
    free(b.used);
    return status;
}

/* ---- the public table ---- */

size_t model_data_weight_count(const model_data *m)
{
    return m->n_entries;
}

colibri_weight model_data_weight(const model_data *m, size_t index)
{
    const weight_entry *entry = &m->entries[index];
    const matrix *value = &entry->matrix;
    int64_t size = (int64_t)colibri_dtype_size(value->dtype);
    colibri_weight out = {.tensor = entry->tensor->name, .file = checkpoint_file_path(m->checkpoint, entry->tensor)};
    role_name(entry->role->name, &hub_spelling, entry->layer, entry->expert, out.name, sizeof out.name);
    out.file_offset =
        entry->tensor->file_offset + ((const unsigned char *)value->data - (const unsigned char *)entry->tensor->data);
    out.replaced = entry->own != NULL;
    out.array.data = out.replaced ? entry->own : value->data;
    out.array.dtype = value->dtype;
    int n = 0;
    if (!entry->role->is_vector) {
        out.array.shape[n] = value->rows;
        out.array.strides[n++] = value->cols * size;
    }
    out.array.shape[n] = value->cols;
    out.array.strides[n++] = size;
    out.array.n_dims = n;
    return out;
}

/* ---- other values in memory ---- */

colibri_status model_data_replace(model_data *m, size_t index, const colibri_array *value, colibri_message *message)
{
    static const char *const names[] = {"float32", "float16", "bfloat16", "int32", "int64"}; /* [colibri_dtype] */
    colibri_weight w = model_data_weight(m, index);
    bool same = value->dtype == w.array.dtype && value->n_dims == w.array.n_dims;
    for (int i = 0; i < w.array.n_dims && same; i++)
        same = value->shape[i] == w.array.shape[i];
    if (!same) {
        char given[100], stored[100];
        return fail(message, COLIBRI_ERROR_ARGUMENT, "weight %s is %s %s, and so must be what replaces it, not %s %s", w.name,
                    names[w.array.dtype], shape_show(w.array.shape, w.array.n_dims, stored, sizeof stored), names[value->dtype],
                    shape_show(value->shape, value->n_dims, given, sizeof given));
    }
    const matrix *stored = &m->entries[index].matrix;
    size_t n_bytes = (size_t)(stored->rows * stored->cols) * colibri_dtype_size(stored->dtype);
    void *own = malloc(n_bytes), *before = m->entries[index].own;
    if (own == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for %zu bytes in the place of %s", n_bytes, w.name);
    memcpy(own, value->data, n_bytes);
    for (size_t i = 0; i < m->n_entries; i++) {
        weight_entry *e = &m->entries[i];
        if (e->matrix.data != stored->data)
            continue;
        e->own = own;
        matrix replaced = e->matrix;
        replaced.data = own;
        memcpy(role_place(m, e->role, e->layer, e->expert), &replaced, sizeof replaced);
    }
    free(before);
    return COLIBRI_OK;
}

void model_data_free_replaced(model_data *m)
{
    for (size_t i = 0; i < m->n_entries; i++) {
        void *own = m->entries[i].own;
        for (size_t j = i; j < m->n_entries && own != NULL; j++) /* tied */
            if (m->entries[j].own == own)
                m->entries[j].own = NULL;
        free(own);
    }
}

const char *model_data_unused(const model_data *m, size_t index)
{
    return m->unused[index]->name;
}
