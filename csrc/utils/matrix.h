/* matrix.h: a weight matrix where the file maps it. The one view of weights that kernels, model and core share. */
#ifndef COLIBRI_MATRIX_H
#define COLIBRI_MATRIX_H

#include "colibri.h"

/* rows x cols, [out, in], row-major, row r at data + r * cols elements. A vector (norm weight, bias) has rows = 1.
 * data may lie at any byte address: read it through memcpy or unaligned loads. data == NULL: the model has no such tensor. */
typedef struct matrix {
    const void *data;
    colibri_dtype dtype; /* F32, F16 or BF16 */
    int64_t rows, cols;
} matrix;

#endif
