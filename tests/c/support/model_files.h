/* model_files.h: temporary folders, and safetensors files whose tensors a test may drop, rename and reshape before they are
 * written. */
#ifndef COLIBRI_TESTS_MODEL_FILES_H
#define COLIBRI_TESTS_MODEL_FILES_H

#include <stddef.h>
#include <stdint.h>

typedef struct folder {
    char path[128];
} folder;

folder folder_make(void);
void folder_remove(const folder *f); /* with the files in it */
char *folder_file(const folder *f, const char *name); /* "path/name", in one of four buffers that take turns */
void file_write(const char *path, const void *data, size_t n_bytes);
void file_write_text(const char *path, const char *text);

/* A raw safetensors file: the header's length is written as it is, or `claimed` when that is not -1. */
void raw_safetensors_write(const char *path, const char *header, int64_t claimed, const void *data, size_t n_bytes);

typedef struct shelf_tensor {
    char name[160], dtype[16];
    int n_dims;
    int64_t shape[4];
    float first; /* element i of an F32 tensor is first + i; other dtypes are zero */
} shelf_tensor;

typedef struct shelf {
    shelf_tensor *tensors;
    int n_tensors, capacity;
} shelf;

shelf_tensor *shelf_add(shelf *s, const char *name, int64_t d0, int64_t d1, int64_t d2,
                        float first);                 /* a dimension of 0 ends the shape */
shelf_tensor *shelf_find(shelf *s, const char *name); /* ends the test when there is none */
void shelf_drop(shelf *s, const char *name);
void shelf_write(const shelf *s, const char *path); /* padding: none, so that data may lie at odd addresses */
void shelf_write_some(const shelf *s, const char *path, int first, int last); /* tensors first <= i < last */
void shelf_free(shelf *s);

/* What a checkpoint of 2 layers, hidden 8, 2 heads of 4, 1 kv head, vocabulary 11, 4 experts of width 6 holds, and its config. */
shelf mixtral_shelf(int experts);
extern const char mixtral_config[];

/* config with `extra` (such as "\"a\":1,") put behind its opening brace; one of four buffers that take turns. */
const char *config_with(const char *config, const char *extra);

#endif
