/* checkpoint.h: from a path to mapped files and one hashed table of every tensor in them.
 *
 * A path may name a folder (model.safetensors before model.safetensors.index.json, as transformers does), a .safetensors file, or
 * an index file. config.json lies beside the weights. Of an index, every file must be there, every tensor must be in the file
 * that it names, and no file may hold a tensor that the index does not list; shard names stay inside the folder. */
#ifndef COLIBRI_MODEL_CHECKPOINT_H
#define COLIBRI_MODEL_CHECKPOINT_H

#include "safetensors.h"

typedef struct checkpoint_file {
    mapfile map;
    safetensors header;
} checkpoint_file;

typedef struct checkpoint {
    char *folder;           /* with its final '/' */
    checkpoint_file *files; /* [n_files], by name */
    int n_files;
    tensor *tensors;        /* [n_tensors], file by file, in the order of their data */
    int64_t n_tensors;
    uint32_t *slots;        /* open addressing over names: index + 1, or 0; [slot_mask + 1] */
    uint64_t slot_mask;
} checkpoint;

/* The folder that holds config.json, with its final '/': path itself or what contains it. The caller frees. NULL: no memory. */
char *checkpoint_folder(const char *path);

colibri_status checkpoint_open(const char *path, checkpoint **out, colibri_message *message);
void checkpoint_free(checkpoint *c); /* accepts NULL */
colibri_status checkpoint_check(const checkpoint *c, colibri_message *message); /* FILE when a file changed under its mapping */

const tensor *checkpoint_find(const checkpoint *c, const char *name); /* NULL: no such tensor */
const char *checkpoint_file_path(const checkpoint *c, const tensor *t);

#endif
