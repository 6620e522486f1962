/* json.h: a bounded, strict JSON reader for config files, index files and safetensors headers.
 *
 * The whole text becomes one array of nodes in document order; a value with children is followed by them. Strings are unescaped,
 * valid UTF-8 and NUL-terminated, so names compare with strcmp. Refused, with line and column: anything RFC 8259 does not allow,
 * nesting deeper than COLIBRI_MAX_JSON_DEPTH, a key that occurs twice in one object (compared after unescaping), lone surrogates,
 * the character U+0000, numbers beyond float64. Memory grows with the text that is there, never with a number written in it. */
#ifndef COLIBRI_MODEL_JSON_H
#define COLIBRI_MODEL_JSON_H

#include "../utils/status.h"

typedef enum json_kind {
    JSON_NULL = 0,
    JSON_FALSE,
    JSON_TRUE,
    JSON_INTEGER,
    JSON_REAL,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
} json_kind;

typedef struct json_node {
    const char *key; /* of a member of an object; else NULL */
    union {
        const char *text; /* JSON_STRING */
        int64_t integer;  /* JSON_INTEGER: written without point or exponent, and within int64 */
        double real;      /* JSON_REAL: every other number */
        int64_t count;    /* JSON_ARRAY, JSON_OBJECT: elements or members */
    } as;
    json_kind kind;
    uint32_t size; /* nodes of this value, itself included: the next sibling is at node + size */
} json_node;

typedef struct json {
    json_node *nodes; /* nodes[0] is the root */
    char *strings;
} json;

/* path names the text in messages; status FORMAT, or MEMORY. On failure *out is zeroed; a zeroed json may be freed. */
colibri_status json_parse(const char *text, size_t n_bytes, const char *path, json *out, colibri_message *message);
void json_free(json *document);

/* for (const json_node *child = json_first(parent); child != NULL; child = json_next(parent, child)); no child in anything but
 * arrays and objects. */
const json_node *json_first(const json_node *parent);
const json_node *json_next(const json_node *parent, const json_node *child);
const json_node *json_member(const json_node *object, const char *key); /* NULL when absent, or when object is NULL or none */

const char *json_kind_name(json_kind kind); /* "a string" ... */
bool json_number(const json_node *node, double *out); /* integer or real */

/* The value as one would write it, cut with "..." when long: for messages. Returns buffer. */
char *json_show(const json_node *node, char *buffer, size_t n_bytes);

#endif
