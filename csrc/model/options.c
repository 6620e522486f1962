#include "options.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const json_node *options_find(options *o, const char *key)
{
    const json_node *value = json_member(o->object, key);
    if (value == NULL)
        return NULL;
    bool known = false;
    for (int i = 0; i < o->n_seen; i++)
        known = known || o->seen[i] == value;
    if (!known && o->n_seen < OPTIONS_MAX_SEEN)
        o->seen[o->n_seen++] = value;
    return value->kind == JSON_NULL ? NULL : value;
}

colibri_status options_refuse(const options *o, const json_node *value, colibri_status status, const char *what)
{
    char shown[80];
    return fail(o->message, status, "%s: %s%.100s = %s: %s", o->path, o->owner, value->key, json_show(value, shown, sizeof shown),
                what);
}

/* An integer may be written as 4096.0. */
static bool whole_number(const json_node *value, int64_t *out)
{
    const double exact = 9007199254740992.0; /* 2^53: beyond it a float64 skips integers */
    if (value->kind == JSON_INTEGER)
        *out = value->as.integer;
    else if (value->kind == JSON_REAL && fabs(value->as.real) <= exact && floor(value->as.real) == value->as.real)
        *out = (int64_t)value->as.real;
    else
        return false;
    return true;
}

colibri_status options_integer(options *o, const char *key, int64_t otherwise, int64_t least, int64_t most, int64_t *out)
{
    const json_node *value = options_find(o, key);
    *out = otherwise;
    if (value == NULL || (whole_number(value, out) && *out >= least && *out <= most))
        return COLIBRI_OK;
    char what[100];
    snprintf(what, sizeof what, "an integer from %lld to %lld was expected", (long long)least, (long long)most);
    return options_refuse(o, value, COLIBRI_ERROR_FORMAT, what);
}

colibri_status options_real(options *o, const char *key, double otherwise, double *out)
{
    const json_node *value = options_find(o, key);
    *out = otherwise;
    return value == NULL || json_number(value, out) ? COLIBRI_OK
                                                    : options_refuse(o, value, COLIBRI_ERROR_FORMAT, "a number was expected");
}

colibri_status options_positive(options *o, const char *key, double otherwise, double *out)
{
    const json_node *value = options_find(o, key);
    *out = otherwise;
    if (value == NULL || (json_number(value, out) && *out > 0))
        return COLIBRI_OK;
    return options_refuse(o, value, COLIBRI_ERROR_FORMAT, "a number above 0 was expected");
}

colibri_status options_boolean(options *o, const char *key, bool otherwise, bool *out)
{
    const json_node *value = options_find(o, key);
    *out = value == NULL ? otherwise : value->kind == JSON_TRUE;
    if (value == NULL || value->kind == JSON_TRUE || value->kind == JSON_FALSE)
        return COLIBRI_OK;
    return options_refuse(o, value, COLIBRI_ERROR_FORMAT, "true or false was expected");
}

colibri_status options_text(options *o, const char *key, const char *otherwise, const char **out)
{
    const json_node *value = options_find(o, key);
    *out = value != NULL && value->kind == JSON_STRING ? value->as.text : otherwise;
    if (value == NULL || value->kind == JSON_STRING)
        return COLIBRI_OK;
    return options_refuse(o, value, COLIBRI_ERROR_FORMAT, "a string was expected");
}

static bool is_blank(const json_node *value)
{
    return value->kind == JSON_NULL || value->kind == JSON_FALSE || (value->kind == JSON_STRING && value->as.text[0] == '\0') ||
           ((value->kind == JSON_ARRAY || value->kind == JSON_OBJECT) && value->as.count == 0);
}

colibri_status options_finish(const options *o, const char *const *harmless, size_t n_harmless)
{
    for (const json_node *value = json_first(o->object); value != NULL; value = json_next(o->object, value)) {
        bool known = value->key[0] == '_' || is_blank(value);
        for (int i = 0; i < o->n_seen && !known; i++)
            known = o->seen[i] == value;
        for (size_t i = 0; i < n_harmless && !known; i++)
            known = strcmp(value->key, harmless[i]) == 0;
        if (!known)
            return options_refuse(o, value, COLIBRI_ERROR_UNSUPPORTED,
                                  "this engine does not know the key, which may change the numbers; remove it only if it does "
                                  "not");
    }
    return COLIBRI_OK;
}
