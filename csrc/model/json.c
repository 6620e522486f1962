#include "json.h"

#include "../utils/utf8.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const unsigned char *text, *at, *end;
    const char *path;
    colibri_message *message;
    json_node *nodes;
    size_t n_nodes, capacity;
    char *strings, *string_end; /* a string takes its bytes and two quotes of the text, so the text's size is enough */
    const char **keys;          /* scratch of the duplicate search */
    size_t n_keys;
} reader;

static colibri_status refuse(const reader *r, const unsigned char *where, const char *what)
{
    size_t line = 1, column = 1;
    for (const unsigned char *p = r->text; p < where; p++) {
        column++;
        if (*p == '\n') {
            line++;
            column = 1;
        }
    }
    return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: line %zu, column %zu: %s", r->path, line, column, what);
}

static colibri_status out_of_memory(const reader *r)
{
    return fail(r->message, COLIBRI_ERROR_MEMORY, "%s: no memory to read its JSON", r->path);
}

static void skip_space(reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
}

static bool take(reader *r, char wanted)
{
    if (r->at == r->end || *r->at != (unsigned char)wanted)
        return false;
    r->at++;
    return true;
}

static colibri_status add_node(reader *r, size_t *index)
{
    if (r->n_nodes == r->capacity) {
        size_t capacity = r->capacity == 0 ? 64 : r->capacity * 2;
        json_node *nodes = realloc(r->nodes, capacity * sizeof *nodes);
        if (nodes == NULL)
            return out_of_memory(r);
        r->nodes = nodes;
        r->capacity = capacity;
    }
    *index = r->n_nodes++;
    memset(&r->nodes[*index], 0, sizeof *r->nodes);
    return COLIBRI_OK;
}

/* ---- strings ---- */

static bool hex4(reader *r, unsigned *out)
{
    unsigned value = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        if (r->at == r->end)
            return false;
        static const char digits[] = "0123456789abcdefABCDEF";
        const char *digit = *r->at == 0 ? NULL : strchr(digits, *r->at);
        if (digit == NULL)
            return false;
        value = value << 4 | (unsigned)(digit - digits < 16 ? digit - digits : digit - digits - 6);
    }
    *out = value;
    return true;
}

static char *put_utf8(char *out, unsigned point)
{
    if (point < 0x80) {
        *out++ = (char)point;
    } else if (point < 0x800) {
        *out++ = (char)(0xC0 | point >> 6);
        *out++ = (char)(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
        *out++ = (char)(0xE0 | point >> 12);
        *out++ = (char)(0x80 | (point >> 6 & 0x3F));
        *out++ = (char)(0x80 | (point & 0x3F));
    } else {
        *out++ = (char)(0xF0 | point >> 18);
        *out++ = (char)(0x80 | (point >> 12 & 0x3F));
        *out++ = (char)(0x80 | (point >> 6 & 0x3F));
        *out++ = (char)(0x80 | (point & 0x3F));
    }
    return out;
}

/* After a backslash. No escape is shorter than the UTF-8 it stands for. */
static colibri_status read_escape(reader *r, char **out)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const unsigned char *start = r->at - 1;
    unsigned char c = r->at < r->end ? *r->at++ : 0;
    const char *simple = c == 0 ? NULL : strchr(names, c);
    if (simple != NULL) {
        *(*out)++ = values[simple - names];
        return COLIBRI_OK;
    }
    unsigned point, low;
    if (c != 'u' || !hex4(r, &point))
        return refuse(r, start, "not a JSON escape");
    if (point >= 0xD800 && point < 0xDC00) {
        if (!take(r, '\\') || !take(r, 'u') || !hex4(r, &low) || low < 0xDC00 || low > 0xDFFF)
            return refuse(r, start, "a high surrogate without its low one");
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
    } else if (point >= 0xDC00 && point < 0xE000) {
        return refuse(r, start, "a low surrogate without its high one");
    }
    if (point == 0)
        return refuse(r, start, "the character U+0000 in a string");
    *out = put_utf8(*out, point);
    return COLIBRI_OK;
}

static colibri_status read_string(reader *r, const char **text)
{
    const unsigned char *start = r->at++; /* the opening quote */
    char *out = r->string_end;
    *text = out;
    for (;;) {
        if (r->at == r->end)
            return refuse(r, start, "a string without an end");
        unsigned char c = *r->at;
        if (c == '"')
            break;
        if (c < 0x20)
            return refuse(r, r->at, "a control character in a string");
        if (c == '\\') {
            r->at++;
            TRY(read_escape(r, &out));
        } else {
            size_t length = utf8_sequence(r->at, (size_t)(r->end - r->at));
            if (length == 0)
                return refuse(r, r->at, "bytes that are not UTF-8");
            memcpy(out, r->at, length);
            out += length;
            r->at += length;
        }
    }
    r->at++;
    *out++ = '\0';
    r->string_end = out;
    return COLIBRI_OK;
}

/* ---- numbers ---- */

static bool is_digit(const reader *r, const unsigned char *at)
{
    return at < r->end && *at >= '0' && *at <= '9';
}

/* Exact for int64; else the nearest float64. strtod gets "digits e exponent" without a decimal point, which would follow the
 * process' locale. */
static colibri_status read_number(reader *r, json_node *node)
{
    enum { MAX_DIGITS = 800 }; /* no float64 needs more to be told from its neighbours */
    const unsigned char *start = r->at;
    char digits[MAX_DIGITS + 32];
    size_t n = 0;
    bool negative = take(r, '-'), is_integer = true;
    if (negative)
        digits[n++] = '-';
    if (!is_digit(r, r->at) || (*r->at == '0' && is_digit(r, r->at + 1)))
        return refuse(r, start, "not a JSON number");

    long shift = 0; /* digits after the point */
    uint64_t magnitude = 0;
    bool fits = true;
    for (; is_digit(r, r->at) || (is_integer && r->at < r->end && *r->at == '.'); r->at++) {
        if (*r->at == '.') {
            is_integer = false;
            if (!is_digit(r, r->at + 1))
                return refuse(r, start, "not a JSON number");
            continue;
        }
        if (n == MAX_DIGITS)
            return refuse(r, start, "a number of more than 799 digits");
        unsigned digit = *r->at - '0';
        fits = fits && magnitude <= (UINT64_MAX - digit) / 10;
        magnitude = fits ? magnitude * 10 + digit : 0;
        digits[n++] = (char)*r->at;
        shift += !is_integer;
    }
    long exponent = 0;
    if (take(r, 'e') || take(r, 'E')) {
        is_integer = false;
        bool down = take(r, '-');
        if (!down)
            take(r, '+');
        if (!is_digit(r, r->at))
            return refuse(r, start, "not a JSON number");
        for (; is_digit(r, r->at); r->at++)
            exponent = exponent < 100000 ? exponent * 10 + (*r->at - '0') : exponent;
        exponent = down ? -exponent : exponent;
    }
    if (is_integer && fits && magnitude <= (uint64_t)INT64_MAX + negative) {
        node->kind = JSON_INTEGER;
        node->as.integer = negative ? -(int64_t)(magnitude - (magnitude > 0)) - (magnitude > 0) : (int64_t)magnitude;
        return COLIBRI_OK;
    }
    snprintf(digits + n, sizeof digits - n, "e%ld", exponent - shift);
    node->kind = JSON_REAL;
    node->as.real = strtod(digits, NULL);
    if (!(fabs(node->as.real) <= 1.7976931348623157e308)) /* DBL_MAX; written so that no compiler flag can fold it */
        return refuse(r, start, "a number beyond float64");
    return COLIBRI_OK;
}

/* ---- values ---- */

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A few keys are compared in pairs, many are sorted, so that no header costs quadratic time. */
static colibri_status refuse_repeated_key(reader *r, size_t object)
{
    json_node *node = &r->nodes[object];
    size_t n = 0, n_members = (size_t)node->as.count;
    if (n_members > r->n_keys) {
        const char **keys = realloc(r->keys, n_members * 2 * sizeof *keys);
        if (keys == NULL)
            return out_of_memory(r);
        r->keys = keys;
        r->n_keys = n_members * 2;
    }
    for (const json_node *child = json_first(node); child != NULL; child = json_next(node, child))
        r->keys[n++] = child->key;
    const char *repeated = NULL;
    if (n <= 8) {
        for (size_t i = 1; i < n && repeated == NULL; i++)
            for (size_t j = 0; j < i; j++)
                repeated = strcmp(r->keys[i], r->keys[j]) == 0 ? r->keys[i] : repeated;
    } else {
        qsort(r->keys, n, sizeof *r->keys, compare_keys);
        for (size_t i = 1; i < n && repeated == NULL; i++)
            repeated = strcmp(r->keys[i], r->keys[i - 1]) == 0 ? r->keys[i] : NULL;
    }
    if (repeated == NULL)
        return COLIBRI_OK;
    return fail(r->message, COLIBRI_ERROR_FORMAT, "%s: the key \"%.200s\" occurs twice in one object", r->path, repeated);
}

static colibri_status read_word(reader *r, const char *word, json_kind kind, json_node *node)
{
    size_t length = strlen(word);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length) != 0)
        return refuse(r, r->at, "not a JSON value");
    r->at += length;
    node->kind = kind;
    return COLIBRI_OK;
}

static colibri_status read_value(reader *r, const char *key, int depth);

static colibri_status read_members(reader *r, size_t index, int depth)
{
    bool is_object = *r->at == '{';
    const unsigned char *start = r->at++;
    int64_t count = 0;
    if (depth == COLIBRI_MAX_JSON_DEPTH)
        return refuse(r, start, "nested too deeply");
    skip_space(r);
    if (!take(r, is_object ? '}' : ']')) {
        for (;; count++) {
            const char *key = NULL;
            skip_space(r);
            if (is_object) {
                if (r->at == r->end || *r->at != '"')
                    return refuse(r, r->at, "a key in quotes was expected");
                TRY(read_string(r, &key));
                skip_space(r);
                if (!take(r, ':'))
                    return refuse(r, r->at, "':' was expected");
            }
            TRY(read_value(r, key, depth + 1));
            skip_space(r);
            if (take(r, ','))
                continue;
            if (take(r, is_object ? '}' : ']'))
                break;
            return refuse(r, r->at, is_object ? "',' or '}' was expected" : "',' or ']' was expected");
        }
        count++;
    }
    json_node *node = &r->nodes[index];
    node->kind = is_object ? JSON_OBJECT : JSON_ARRAY;
    node->as.count = count;
    node->size = (uint32_t)(r->n_nodes - index);
    return is_object ? refuse_repeated_key(r, index) : COLIBRI_OK;
}

static colibri_status read_value(reader *r, const char *key, int depth)
{
    size_t index = 0;
    TRY(add_node(r, &index));
    json_node *node = &r->nodes[index];
    node->key = key;
    node->size = 1;
    skip_space(r);
    switch (r->at == r->end ? 0 : *r->at) {
    case '{':
    case '[':
        return read_members(r, index, depth);
    case '"':
        node->kind = JSON_STRING;
        return read_string(r, &node->as.text);
    case 'n':
        return read_word(r, "null", JSON_NULL, node);
    case 'f':
        return read_word(r, "false", JSON_FALSE, node);
    case 't':
        return read_word(r, "true", JSON_TRUE, node);
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return read_number(r, node);
    default:
        return refuse(r, r->at, r->at == r->end ? "the text ends too early" : "not a JSON value");
    }
}

static colibri_status read_document(reader *r)
{
    static const char mark[] = "\xEF\xBB\xBF";
    if (r->end - r->text >= 3 && memcmp(r->text, mark, 3) == 0)
        return refuse(r, r->text, "a UTF-8 byte order mark (BOM) stands before the JSON; save the file without it");
    TRY(read_value(r, NULL, 0));
    skip_space(r);
    return r->at == r->end ? COLIBRI_OK : refuse(r, r->at, "more text after the JSON value");
}

colibri_status json_parse(const char *text, size_t n_bytes, const char *path, json *out, colibri_message *message)
{
    memset(out, 0, sizeof *out);
    if (n_bytes > COLIBRI_MAX_HEADER_BYTES)
        return fail(message, COLIBRI_ERROR_FORMAT, "%s: %zu bytes of JSON; at most %d are read", path, n_bytes,
                    COLIBRI_MAX_HEADER_BYTES);
    const unsigned char *bytes = (const unsigned char *)text;
    reader r = {.text = bytes, .at = bytes, .end = bytes + n_bytes, .path = path, .message = message};
    r.strings = r.string_end = malloc(n_bytes + 1);
    colibri_status status = r.strings == NULL ? out_of_memory(&r)
                            : n_bytes == 0    ? refuse(&r, bytes, "no JSON here")
                                              : read_document(&r);
    free(r.keys);
    *out = (json){r.nodes, r.strings};
    if (status != COLIBRI_OK)
        json_free(out);
    return status;
}

void json_free(json *document)
{
    free(document->nodes);
    free(document->strings);
    memset(document, 0, sizeof *document);
}

/* ---- walking ---- */

const json_node *json_first(const json_node *parent)
{
    return parent != NULL && parent->size > 1 ? parent + 1 : NULL;
}

const json_node *json_next(const json_node *parent, const json_node *child)
{
    const json_node *next = child + child->size;
    return next < parent + parent->size ? next : NULL;
}

const json_node *json_member(const json_node *object, const char *key)
{
    if (object == NULL || object->kind != JSON_OBJECT)
        return NULL;
    for (const json_node *child = json_first(object); child != NULL; child = json_next(object, child))
        if (strcmp(child->key, key) == 0)
            return child;
    return NULL;
}

const char *json_kind_name(json_kind kind)
{
    static const char *const names[] = {"null", "false", "true", "an integer", "a number", "a string", "a list", "an object"};
    return names[kind];
}

bool json_number(const json_node *node, double *out)
{
    if (node->kind != JSON_INTEGER && node->kind != JSON_REAL)
        return false;
    *out = node->kind == JSON_INTEGER ? (double)node->as.integer : node->as.real;
    return true;
}

char *json_show(const json_node *node, char *buffer, size_t n_bytes)
{
    switch (node->kind) {
    case JSON_INTEGER: snprintf(buffer, n_bytes, "%lld", (long long)node->as.integer); break;
    case JSON_REAL: snprintf(buffer, n_bytes, "%g", node->as.real); break;
    case JSON_STRING:
        snprintf(buffer, n_bytes, "\"%.*s%s\"", (int)n_bytes - 8, node->as.text,
                 strlen(node->as.text) > n_bytes - 8 ? "..." : "");
        break;
    case JSON_ARRAY: snprintf(buffer, n_bytes, "a list of %lld", (long long)node->as.count); break;
    case JSON_OBJECT: snprintf(buffer, n_bytes, "an object of %lld keys", (long long)node->as.count); break;
    default: snprintf(buffer, n_bytes, "%s", json_kind_name(node->kind));
    }
    return buffer;
}
