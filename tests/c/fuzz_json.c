/* Fuzz target: any bytes as JSON. What parses is walked whole, so that a wrong node size or an unterminated string is seen.
 * tools/soak.sh builds and runs it. */
#include "model/json.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint32_t walk(const json_node *node)
{
    uint32_t n_nodes = 1;
    int64_t n_children = 0;
    char shown[32];
    json_show(node, shown, sizeof shown);
    if (node->kind == JSON_STRING)
        n_nodes += strlen(node->as.text) > SIZE_MAX / 2; /* reads up to the end */
    for (const json_node *child = json_first(node); child != NULL; child = json_next(node, child), n_children++) {
        if (node->kind == JSON_OBJECT && json_member(node, child->key) != child)
            abort(); /* a key that occurs twice was let through */
        n_nodes += walk(child);
    }
    if (n_nodes != node->size || ((node->kind == JSON_ARRAY || node->kind == JSON_OBJECT) && n_children != node->as.count))
        abort();
    return n_nodes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json document;
    colibri_message message;
    if (json_parse((const char *)data, size, "fuzz", &document, &message) == COLIBRI_OK)
        walk(document.nodes);
    json_free(&document);
    return 0;
}
