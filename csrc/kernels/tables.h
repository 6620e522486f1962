/* tables.h: the kernel tables that exist, one per instruction set. Only select.c and the tables' own files need it. */
#ifndef COLIBRI_TABLES_H
#define COLIBRI_TABLES_H

#include "kernels.h"

extern const kernels kernels_scalar;

#endif
