/* tables.h: the kernel tables that exist, one per instruction set. Only select.c and the tables' own files need it. */
#ifndef COLIBRI_TABLES_H
#define COLIBRI_TABLES_H

#include "kernels.h"

#if defined(__x86_64__)
extern const kernels kernels_avx512; /* needs AVX-512 F, BW, DQ, VL */
extern const kernels kernels_avx2;   /* needs AVX2, FMA, F16C */
extern const kernels kernels_sse2;   /* any x86-64 */
extern const kernels kernels_scalar_fma; /* needs FMA; goes by the name "scalar" as well */
#elif defined(__aarch64__)
extern const kernels kernels_neon; /* any aarch64 */
#endif
extern const kernels kernels_scalar;

#endif
