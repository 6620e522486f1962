/* config_layers.c: which layers are a mixture of experts, and which see only a window of keys. */
#include "config_parts.h"

#include <string.h>

static colibri_status read_moe_layers(options *o, const family *f, config *c)
{
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        c->is_moe[l] = true;
    if (!f->has_dense_layers)
        return COLIBRI_OK;
    int64_t step;
    TRY(options_integer(o, "decoder_sparse_step", 1, 1, INT32_MAX, &step));
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        c->is_moe[l] = (l + 1) % step == 0;
    const json_node *dense = options_find(o, "mlp_only_layers");
    if (dense != NULL && dense->kind != JSON_ARRAY)
        return options_refuse(o, dense, COLIBRI_ERROR_FORMAT, "a list of layer numbers was expected");
    for (const json_node *layer = json_first(dense); layer != NULL; layer = json_next(dense, layer)) {
        if (layer->kind != JSON_INTEGER || layer->as.integer < 0 || layer->as.integer >= c->num_hidden_layers) {
            char shown[80];
            return fail(o->message, COLIBRI_ERROR_FORMAT,
                        "%s: mlp_only_layers holds %s, which is no layer: num_hidden_layers = %lld makes them 0 to %lld", o->path,
                        json_show(layer, shown, sizeof shown), (long long)c->num_hidden_layers,
                        (long long)c->num_hidden_layers - 1);
        }
        c->is_moe[layer->as.integer] = false;
    }
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        if (c->is_moe[l])
            return COLIBRI_OK;
    return fail(o->message, COLIBRI_ERROR_UNSUPPORTED,
                "%s: decoder_sparse_step = %lld and mlp_only_layers leave no mixture-of-experts layer", o->path, (long long)step);
}

/* layer_types, when given, decides where the rule is WINDOW_ALTERNATING; elsewhere the model class does not read it, so it must
 * agree. */
static colibri_status apply_layer_types(options *o, const json_node *types, bool decides, int64_t width, config *c)
{
    if (types->kind != JSON_ARRAY || types->as.count != c->num_hidden_layers)
        return options_refuse(o, types, COLIBRI_ERROR_FORMAT, "a list with one entry for each of num_hidden_layers was expected");
    int64_t l = 0;
    for (const json_node *type = json_first(types); type != NULL; type = json_next(types, type), l++) {
        bool slides = type->kind == JSON_STRING && strcmp(type->as.text, "sliding_attention") == 0;
        if (!slides && (type->kind != JSON_STRING || strcmp(type->as.text, "full_attention") != 0)) {
            char shown[80];
            return fail(o->message, COLIBRI_ERROR_UNSUPPORTED,
                        "%s: layer_types[%lld] = %s is not supported; supported are \"full_attention\" and "
                        "\"sliding_attention\"",
                        o->path, (long long)l, json_show(type, shown, sizeof shown));
        }
        if (decides)
            c->window[l] = slides ? width : 0;
        if (slides != (c->window[l] > 0))
            return fail(o->message, COLIBRI_ERROR_FORMAT,
                        "%s: layer_types[%lld] = \"%s\" contradicts sliding_window and use_sliding_window, by which "
                        "that layer %s",
                        o->path, (long long)l, type->as.text, c->window[l] > 0 ? "has a window" : "has none");
    }
    return COLIBRI_OK;
}

static colibri_status read_windows(options *o, const family *f, config *c)
{
    int64_t width = 0, max_window_layers = INT32_MAX;
    bool used = f->window == WINDOW_EVERY_LAYER;
    if (f->window == WINDOW_IF_USED || f->window == WINDOW_ALTERNATING) {
        TRY(options_boolean(o, "use_sliding_window", false, &used));
        TRY(options_integer(o, "max_window_layers", 28, 0, INT32_MAX, &max_window_layers));
    }
    if (f->window != WINDOW_NEVER) {
        const json_node *value = options_find(o, "sliding_window"); /* read even when unused, so that it is a known key */
        if (used)
            TRY(options_integer(o, "sliding_window", 0, 1, INT32_MAX, &width));
        if (used && value == NULL && f->window != WINDOW_EVERY_LAYER) {
            if (json_member(o->object, "sliding_window") != NULL && f->window == WINDOW_ALTERNATING)
                return fail(o->message, COLIBRI_ERROR_FORMAT,
                            "%s: use_sliding_window is true but sliding_window is null; give its width", o->path);
            width = json_member(o->object, "sliding_window") != NULL ? 0 : 4096; /* the class default of the qwen families */
        }
    }
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        c->window[l] = f->window == WINDOW_ALTERNATING && (l % 2 != 0 || l >= max_window_layers) ? 0 : width;
    const json_node *types = options_find(o, "layer_types");
    return types == NULL ? COLIBRI_OK : apply_layer_types(o, types, f->window == WINDOW_ALTERNATING, width, c);
}

colibri_status config_read_layers(options *o, const family *f, config *c)
{
    TRY(read_moe_layers(o, f, c));
    return read_windows(o, f, c);
}
