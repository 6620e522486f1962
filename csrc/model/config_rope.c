/* config_rope.c: rotary options in both spellings. Newer configs have rope_parameters {rope_type, rope_theta, ...}; older ones
 * rope_theta at the top and rope_scaling {type or rope_type, ...} or null. Given twice, they must agree. */
#include "config_parts.h"

#include <string.h>

const char *rope_type_name(rope_type type)
{
    static const char *const names[] = {"default", "linear", "llama3", "yarn"};
    return names[type];
}

static colibri_status read_type(options *o, rope_type *type)
{
    const json_node *new_name = options_find(o, "rope_type"), *old_name = options_find(o, "type");
    const json_node *value = new_name != NULL ? new_name : old_name;
    *type = ROPE_DEFAULT;
    if (value == NULL)
        return COLIBRI_OK;
    if (new_name != NULL && old_name != NULL &&
        (new_name->kind != JSON_STRING || old_name->kind != JSON_STRING || strcmp(new_name->as.text, old_name->as.text) != 0))
        return options_refuse(o, old_name, COLIBRI_ERROR_FORMAT, "rope_type and type are both given and differ");
    for (rope_type t = ROPE_DEFAULT; t <= ROPE_YARN; t++) {
        if (value->kind == JSON_STRING && strcmp(value->as.text, rope_type_name(t)) == 0) {
            *type = t;
            return COLIBRI_OK;
        }
    }
    return options_refuse(o, value, COLIBRI_ERROR_UNSUPPORTED,
                          "this rope type is not supported; supported are default, linear, llama3, yarn");
}

static colibri_status require(options *o, const char *key, const char *type)
{
    if (options_find(o, key) != NULL)
        return COLIBRI_OK;
    return fail(o->message, COLIBRI_ERROR_FORMAT, "%s: %s%s is missing; rope type %s needs it", o->path, o->owner, key, type);
}

static colibri_status read_original_length(options *root, options *o, const config *c, rope_config *rope)
{
    TRY(options_integer(o, "original_max_position_embeddings", c->max_position_embeddings, 1, INT32_MAX,
                        &rope->original_max_position_embeddings));
    return options_integer(root, "original_max_position_embeddings", rope->original_max_position_embeddings, 1, INT32_MAX,
                           &rope->original_max_position_embeddings); /* at the top level it wins */
}

static colibri_status read_llama3(options *root, options *o, const config *c, rope_config *rope)
{
    TRY(read_original_length(root, o, c, rope));
    TRY(require(o, "low_freq_factor", "llama3"));
    TRY(require(o, "high_freq_factor", "llama3"));
    TRY(options_positive(o, "low_freq_factor", 1, &rope->low_freq_factor));
    TRY(options_positive(o, "high_freq_factor", 1, &rope->high_freq_factor));
    if (rope->high_freq_factor > rope->low_freq_factor)
        return COLIBRI_OK;
    return options_refuse(o, options_find(o, "high_freq_factor"), COLIBRI_ERROR_FORMAT, "it must be above low_freq_factor");
}

static colibri_status read_yarn(options *root, options *o, const config *c, rope_config *rope)
{
    double mscale, mscale_all_dim;
    TRY(read_original_length(root, o, c, rope));
    TRY(options_positive(o, "factor", (double)c->max_position_embeddings / (double)rope->original_max_position_embeddings,
                         &rope->factor));
    TRY(options_positive(o, "beta_fast", 32, &rope->beta_fast));
    TRY(options_positive(o, "beta_slow", 1, &rope->beta_slow));
    TRY(options_boolean(o, "truncate", true, &rope->truncate));
    TRY(options_real(o, "mscale", 0, &mscale));
    TRY(options_real(o, "mscale_all_dim", 0, &mscale_all_dim));
    TRY(options_positive(o, "attention_factor", rope_yarn_attention_factor(rope->factor, mscale, mscale_all_dim),
                         &rope->attention_factor));
    if (rope->theta <= 1)
        return fail(o->message, COLIBRI_ERROR_FORMAT, "%s: rope_theta = %g: rope type yarn needs a value above 1", o->path,
                    rope->theta);
    if (!(rope->attention_factor > 0 && rope->attention_factor < 1e30))
        return fail(o->message, COLIBRI_ERROR_FORMAT,
                    "%s: %smscale = %g and mscale_all_dim = %g give an attention factor of %g; a number above 0 was expected",
                    o->path, o->owner, mscale, mscale_all_dim, rope->attention_factor);
    return COLIBRI_OK;
}

/* A base whose powers stay well inside float32. */
static colibri_status read_theta(options *o, double otherwise, double *theta)
{
    TRY(options_positive(o, "rope_theta", otherwise, theta));
    if (*theta >= 1e-30 && *theta <= 1e30)
        return COLIBRI_OK;
    return options_refuse(o, options_find(o, "rope_theta"), COLIBRI_ERROR_FORMAT, "a number from 1e-30 to 1e30 was expected");
}

/* One of the two objects; object NULL: absent, then only the top-level keys count. */
static colibri_status read_object(options *root, const json_node *object, const char *owner, const family *f, const config *c,
                                  rope_config *rope)
{
    static const char *const harmless[] = {"finetuned"};
    memset(rope, 0, sizeof *rope);
    rope->attention_factor = 1;
    rope->factor = 1;
    TRY(read_theta(root, f->rope_theta, &rope->theta));
    if (object == NULL)
        return COLIBRI_OK;
    if (object->kind != JSON_OBJECT)
        return options_refuse(root, object, COLIBRI_ERROR_FORMAT, "an object or null was expected");
    options o = {.object = object, .path = root->path, .owner = owner, .message = root->message};
    double theta, partial;
    TRY(read_theta(&o, rope->theta, &theta));
    if (options_find(root, "rope_theta") != NULL && theta != rope->theta)
        return options_refuse(&o, options_find(&o, "rope_theta"), COLIBRI_ERROR_FORMAT,
                              "rope_theta at the top level has another value");
    rope->theta = theta;
    TRY(options_real(&o, "partial_rotary_factor", 1, &partial));
    if (partial != 1)
        return options_refuse(&o, options_find(&o, "partial_rotary_factor"), COLIBRI_ERROR_UNSUPPORTED,
                              "only 1, rotating the whole head, is supported");
    TRY(read_type(&o, &rope->type));
    if (rope->type == ROPE_LINEAR || rope->type == ROPE_LLAMA3) {
        TRY(require(&o, "factor", rope_type_name(rope->type)));
        TRY(options_positive(&o, "factor", 1, &rope->factor));
    }
    if (rope->type == ROPE_LLAMA3)
        TRY(read_llama3(root, &o, c, rope));
    if (rope->type == ROPE_YARN)
        TRY(read_yarn(root, &o, c, rope));
    return options_finish(&o, harmless, sizeof harmless / sizeof *harmless);
}

static bool same_rope(const rope_config *a, const rope_config *b)
{
    return a->type == b->type && a->theta == b->theta && a->factor == b->factor && a->low_freq_factor == b->low_freq_factor &&
           a->high_freq_factor == b->high_freq_factor && a->beta_fast == b->beta_fast && a->beta_slow == b->beta_slow &&
           a->attention_factor == b->attention_factor && a->truncate == b->truncate &&
           a->original_max_position_embeddings == b->original_max_position_embeddings;
}

colibri_status config_read_rope(options *o, const family *f, config *c)
{
    const json_node *parameters = options_find(o, "rope_parameters"), *scaling = options_find(o, "rope_scaling");
    double partial;
    TRY(options_real(o, "partial_rotary_factor", 1, &partial));
    if (partial != 1)
        return options_refuse(o, options_find(o, "partial_rotary_factor"), COLIBRI_ERROR_UNSUPPORTED,
                              "only 1, rotating the whole head, is supported");
    if (parameters == NULL)
        return read_object(o, scaling, "rope_scaling.", f, c, &c->rope);
    TRY(read_object(o, parameters, "rope_parameters.", f, c, &c->rope));
    if (scaling == NULL || (scaling->kind == JSON_OBJECT && scaling->as.count == 0))
        return COLIBRI_OK;
    rope_config other;
    TRY(read_object(o, scaling, "rope_scaling.", f, c, &other));
    if (options_find(o, "rope_theta") == NULL && json_member(scaling, "rope_theta") == NULL)
        other.theta = c->rope.theta; /* the older spelling never nested it */
    if (!same_rope(&c->rope, &other))
        return options_refuse(o, scaling, COLIBRI_ERROR_FORMAT,
                              "rope_parameters is given too and says something else; remove one");
    return COLIBRI_OK;
}
