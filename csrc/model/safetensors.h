/* safetensors.h: the header of one mapped file, checked, as a table of tensors over the mapping.
 *
 * A safetensors file is a little-endian u64 (the length of the header), the header (a JSON object: name -> {dtype, shape,
 * data_offsets}, and optionally __metadata__, an object of strings), and the data. Every tensor lies inside the data, has exactly
 * the bytes that its dtype and shape ask for, and all of them together cover the data without gap or overlap. What the reference
 * reader refuses is refused; stricter than it are: a header must begin with '{', as the format says; no name occurs twice; a
 * dimension of 0 hides no overflow beside it; at most SAFETENSORS_MAX_DIMS dimensions. Data is never read. */
#ifndef COLIBRI_MODEL_SAFETENSORS_H
#define COLIBRI_MODEL_SAFETENSORS_H

#include "../utils/mapfile.h"
#include "../utils/status.h"
#include "json.h"

#define SAFETENSORS_MAX_DIMS 8

typedef struct tensor {
    const char *name;      /* lives as long as the safetensors */
    const char *dtype;     /* as the format spells it: "F32", "BF16", "F8_E4M3" ... */
    const void *data;      /* at any byte address; past the end of the mapping by nothing when n_bytes is 0 */
    int64_t n_bytes, file_offset;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int n_dims;            /* 0: a scalar */
    int file;              /* for the owner of several files; 0 here */
} tensor;

typedef struct safetensors {
    tensor *tensors; /* in the order of their data */
    int64_t n_tensors;
    json header;     /* holds the names */
} safetensors;

/* file stays with the caller and must outlive *out. On failure *out is zeroed; a zeroed safetensors may be freed. */
colibri_status safetensors_read(const mapfile *file, safetensors *out, colibri_message *message);
void safetensors_free(safetensors *s);

/* "[2, 3]" into buffer, for messages. Returns buffer. */
char *shape_show(const int64_t *shape, int n_dims, char *buffer, size_t n_bytes);

#endif
