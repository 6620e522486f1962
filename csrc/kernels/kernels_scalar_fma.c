/* kernels_scalar_fma.c: the scalar definition once more, with the CPU's own fused multiply-add. */
#include "tables.h"

#if defined(__x86_64__)
#if !defined(__FMA__)
#error "compile this file with -mfma"
#endif

#define TABLE kernels_scalar_fma
#include "kernels_scalar.c"
#endif
