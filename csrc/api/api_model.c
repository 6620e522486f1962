#include <stdlib.h>

#include "../model/checkpoint.h"
#include "../utils/atomics.h"
#include "../utils/mapguard.h"
#include "handles.h"

colibri_status colibri_model_open(const char *path, colibri_model **model, colibri_message *message)
{
    if (model == NULL || path == NULL)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "colibri_model_open needs a path and a place for the model");
    *model = NULL;
    TRY(kernels_select(message));
    colibri_model *m = calloc(1, sizeof *m);
    if (m == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a model");
    mapguard_enter();
    colibri_status status = model_data_open(path, &m->data, message);
    mapguard_leave();
    if (status != COLIBRI_OK) {
        free(m);
        return status;
    }
    m->references = 1;
    *model = m;
    return COLIBRI_OK;
}

void colibri_model_retain(colibri_model *model)
{
    atomic_add(&model->references, 1);
}

void colibri_model_release(colibri_model *model)
{
    if (model == NULL || atomic_add(&model->references, -1) > 0)
        return;
    model_data_free(model->data);
    free(model);
}

int64_t colibri_model_users(const colibri_model *model)
{
    return atomic_load_acquire(&model->users);
}

void model_add_user(colibri_model *model)
{
    colibri_model_retain(model);
    atomic_add(&model->users, 1);
}

void model_drop_user(colibri_model *model)
{
    atomic_add(&model->users, -1);
    colibri_model_release(model);
}

colibri_status colibri_model_check_files(const colibri_model *model, colibri_message *message)
{
    return model_data_check_files(model->data, message);
}

size_t colibri_model_field_count(const colibri_model *model)
{
    return model_data_field_count(model->data);
}

colibri_field colibri_model_field(const colibri_model *model, size_t index)
{
    return model_data_field(model->data, index);
}

colibri_layer_info colibri_model_layer(const colibri_model *model, int64_t layer)
{
    const config *c = &model->data->config;
    if (layer < 0 || layer >= c->num_hidden_layers)
        return (colibri_layer_info){0};
    return (colibri_layer_info){.is_moe = c->is_moe[layer],
                                .has_shared_expert = c->is_moe[layer] && c->shared_expert_intermediate_size > 0,
                                .window = c->window[layer]};
}

size_t colibri_model_weight_count(const colibri_model *model)
{
    return model_data_weight_count(model->data);
}

colibri_weight colibri_model_weight(const colibri_model *model, size_t index)
{
    return model_data_weight(model->data, index);
}

colibri_status colibri_model_replace(colibri_model *model, size_t index, const colibri_array *value, colibri_message *message)
{
    if (index >= model_data_weight_count(model->data))
        return fail(message, COLIBRI_ERROR_ARGUMENT, "the model has %zu weights", model_data_weight_count(model->data));
    if (colibri_model_users(model) > 0)
        return fail(message, COLIBRI_ERROR_BUSY, "a weight cannot be replaced while sessions or views of the model live");
    return model_data_replace(model->data, index, value, message);
}

size_t colibri_model_unused_count(const colibri_model *model)
{
    return model->data->n_unused;
}

const char *colibri_model_unused(const colibri_model *model, size_t index)
{
    return model_data_unused(model->data, index);
}

size_t colibri_model_file_count(const colibri_model *model)
{
    return (size_t)model->data->checkpoint->n_files;
}

colibri_file colibri_model_file(const colibri_model *model, size_t index)
{
    const mapfile *map = &model->data->checkpoint->files[index].map;
    return (colibri_file){map->path, map->data, map->n_bytes};
}

size_t colibri_model_blocks(const colibri_model *model, colibri_block *out, size_t capacity)
{
    return blocks_of(model->data, out, capacity);
}
