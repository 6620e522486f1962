/* model.c: a model is its config, its weights and the mapped files they lie in. */
#include "checkpoint.h"
#include "roles.h"
#include "shards.h"
#include "weights.h"

#include <stdlib.h>
#include <string.h>

static colibri_status read_config(const char *path, config *c, colibri_message *message)
{
    if (path_look(path) == PATH_MISSING)
        return fail(message, COLIBRI_ERROR_FILE, "%s: no such file or folder", path);
    char *folder = checkpoint_folder(path);
    char *config_path = folder == NULL ? NULL : path_join(folder, "config.json");
    colibri_status status;
    mapfile file;
    if (config_path == NULL)
        status = fail(message, COLIBRI_ERROR_MEMORY, "no memory to open %s", path);
    else if (path_look(config_path) == PATH_MISSING)
        status = fail(message, COLIBRI_ERROR_FILE, "%s has no config.json, which says what the model computes", folder);
    else
        status = mapfile_open(config_path, &file, message);
    if (status == COLIBRI_OK) {
        status = config_read((const char *)file.data, (size_t)file.n_bytes, config_path, c, message);
        mapfile_close(&file);
    }
    free(config_path);
    free(folder);
    return status;
}

static colibri_status make_inv_freq(model_data *m, colibri_message *message)
{
    int64_t n = m->config.head_dim / 2;
    m->inv_freq = malloc((size_t)n * sizeof *m->inv_freq);
    if (m->inv_freq == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for %lld rotary frequencies", (long long)n);
    rope_inv_freq(&m->config, m->inv_freq);
    for (int64_t j = 0; j < n; j++)
        if (!(m->inv_freq[j] > 0 && m->inv_freq[j] <= 3.402823466e38f))
            return fail(message, COLIBRI_ERROR_FORMAT,
                        "config.json: the rope options (theta %g, factor %g) give a rotary frequency outside float32",
                        m->config.rope.theta, m->config.rope.factor);
    return COLIBRI_OK;
}

static colibri_status open_parts(const char *path, model_data *m, colibri_message *message)
{
    TRY(read_config(path, &m->config, message));
    TRY(checkpoint_open(path, &m->checkpoint, message));
    TRY(weights_bind(m, message)); /* before any memory of a size that only the config claims */
    return make_inv_freq(m, message);
}

colibri_status model_data_open(const char *path, model_data **out, colibri_message *message)
{
    *out = NULL;
    model_data *m = calloc(1, sizeof *m);
    if (m == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory to open %s", path);
    colibri_status status = open_parts(path, m, message);
    if (status != COLIBRI_OK) {
        model_data_free(m);
        return status;
    }
    *out = m;
    return COLIBRI_OK;
}

void model_data_free(model_data *m)
{
    if (m == NULL)
        return;
    for (int64_t l = 0; m->weights.layers != NULL && l < m->config.num_hidden_layers; l++)
        free(m->weights.layers[l].experts);
    free(m->weights.layers);
    model_data_free_replaced(m);
    free(m->entries);
    free(m->unused);
    free(m->inv_freq);
    checkpoint_free(m->checkpoint);
    free(m);
}

colibri_status model_data_check_files(const model_data *m, colibri_message *message)
{
    return checkpoint_check(m->checkpoint, message);
}
