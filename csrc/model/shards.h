/* shards.h: which files a checkpoint consists of, and which tensor its index expects in which of them. */
#ifndef COLIBRI_MODEL_SHARDS_H
#define COLIBRI_MODEL_SHARDS_H

#include "../utils/mapfile.h"
#include "../utils/status.h"
#include "json.h"

typedef struct shards {
    const char **names; /* [n_files], sorted, each once; relative to the folder */
    int n_files;
    char *index_path;   /* NULL: a single file without index */
    json index;
    const json_node *weight_map; /* tensor -> shard name; NULL without index */
} shards;

/* path as in checkpoint.h; folder is checkpoint_folder(path). On failure *out is zeroed; a zeroed shards may be freed. */
colibri_status shards_find(const char *path, const char *folder, shards *out, colibri_message *message);
void shards_free(shards *s);

char *path_join(const char *folder, const char *name); /* folder ends in '/'; the caller frees; NULL: out of memory */

#endif
