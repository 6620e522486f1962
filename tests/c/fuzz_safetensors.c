/* Fuzz target: any bytes as a safetensors file. Of what is accepted every byte of every tensor is read, and together they must
 * cover the data.
 * tools/soak.sh builds and runs it. */
#include "model/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[] = "fuzz.safetensors", shape[64];
    mapfile file = {.path = path, .data = size == 0 ? NULL : data, .n_bytes = (int64_t)size};
    safetensors table;
    colibri_message message;
    if (safetensors_read(&file, &table, &message) == COLIBRI_OK) {
        int64_t total = 0;
        unsigned sum = 0;
        for (int64_t i = 0; i < table.n_tensors; i++) {
            const tensor *t = &table.tensors[i];
            for (int64_t b = 0; b < t->n_bytes; b++)
                sum += ((const unsigned char *)t->data)[b];
            if (t->file_offset < 8 || t->file_offset + t->n_bytes > file.n_bytes || strlen(t->name) > size || sum == 1u << 31)
                abort();
            shape_show(t->shape, t->n_dims, shape, sizeof shape);
            total += t->n_bytes;
        }
        uint64_t header = 0;
        for (int i = 7; i >= 0; i--)
            header = header << 8 | data[i];
        if (total != file.n_bytes - 8 - (int64_t)header)
            abort();
    }
    safetensors_free(&table);
    return 0;
}
