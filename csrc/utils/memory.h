/* memory.h: anonymous memory that is reserved at once and touched page by page, in blocks with a reference count.
 *
 * A block is what a lease keeps alive. Its memory is zero, page aligned, and never moves. Reserving is cheap: pages cost memory
 * when first written. */
#ifndef COLIBRI_MEMORY_H
#define COLIBRI_MEMORY_H

#include "status.h"

typedef struct block block;

colibri_status block_create(int64_t n_bytes, block **out, colibri_message *message); /* one reference */
void block_retain(block *b);
void block_release(block *b); /* accepts NULL; unmaps at zero */
int64_t block_references(const block *b);
unsigned char *block_data(block *b);
int64_t block_bytes(const block *b);

/* Bytes this process may still use: the least of MemAvailable, the cgroup's headroom and what its own limits (ulimit) leave. */
int64_t memory_available(void);

/* Carving a plan into one block: each call rounds up to 64 bytes and returns the offset. Overflow is kept in the sum and reported
 * as < 0. */
typedef struct plan {
    int64_t n_bytes;
} plan;
int64_t plan_take(plan *p, int64_t count, int64_t element_size);

#endif
