#include "colibri.h"

size_t colibri_dtype_size(colibri_dtype dtype)
{
    switch (dtype) {
    case COLIBRI_F16:
    case COLIBRI_BF16: return 2;
    case COLIBRI_I64: return 8;
    default: return 4;
    }
}
