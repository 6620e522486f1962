/* memory.h: the blocks of a session: memory that is reserved at once, with a reference count.
 *
 * A block is what a lease keeps alive. Its memory is zero (of a file: what the file holds), page aligned, and never moves. Reserving is cheap: pages cost memory
 * when first written (pages.h says which pages). Every block alive is listed under its owner, so that memory which only a view
 * still keeps can be shown. */
#ifndef COLIBRI_MEMORY_H
#define COLIBRI_MEMORY_H

#include "status.h"

typedef struct block block;

typedef enum block_use {
    BLOCK_HISTORY = 0, /* grows row by row and may stay untouched */
    BLOCK_WORK         /* written from end to end again and again */
} block_use;

/* One reference. `owner` is only compared. */
colibri_status block_create(int64_t n_bytes, block_use use, const void *owner, block **out, colibri_message *message);
/* A block that is a piece of a file (pages_map_file). A page that the file loses is noted by mapguard.h. */
colibri_status block_of_file(int64_t n_bytes, int file, int64_t offset, const void *owner, block **out, colibri_message *message);
void block_retain(block *b);
void block_release(block *b); /* accepts NULL; unmaps at zero */
int64_t block_references(const block *b);
unsigned char *block_data(block *b);
int64_t block_bytes(const block *b);
colibri_block block_describe(const block *b);

/* Writes up to `capacity` of the owner's blocks that are alive, newest first; returns how many there are. */
size_t blocks_of(const void *owner, colibri_block *out, size_t capacity);

/* Bytes this process may still use: the least of MemAvailable, the cgroup's headroom and what its own limits (ulimit) leave. */
int64_t memory_available(void);

/* Carving a plan into one block: each call rounds up to 64 bytes and returns the offset. Overflow is kept in the sum and reported
 * as < 0. */
typedef struct plan {
    int64_t n_bytes;
} plan;
int64_t plan_take(plan *p, int64_t count, int64_t element_size);

#endif
