/* boundary.h: what happens to the values of a point (points.h) between their computation and their first reader: they are rounded
 * to the number format that the session emulates there, then counted by bit pattern, so that the first stage with a NaN or an Inf
 * is known.
 *
 * A piece passes as soon as it is computed, on the thread that computed it, whole rows or some columns of them. When nothing
 * happens to values, machine.boundary is NULL: one test for each piece is all that is left.
 *
 * Counts are kept for each thread while a stage runs, then for the pass in progress, then for each closed pass: so they are the
 * same however work was split, a stage that did not end leaves none, and they follow when passes are abandoned. */
#ifndef COLIBRI_CORE_BOUNDARY_H
#define COLIBRI_CORE_BOUNDARY_H

#include "machine.h"
#include "points.h"

/* What one thread counted of the stage that runs. */
typedef struct thread_counts {
    uint64_t touched; /* bit p: rows[p] says something */
    colibri_watch_row rows[POINT_COUNT];
} thread_counts;

/* What is kept of a closed pass at one point: what cannot be told from the sum of all passes. Where the first value that is not
 * finite stands can: passes follow each other token by token, so it is the sum's, if that pass is kept, or there is none. */
typedef struct pass_counts {
    int64_t n, n_nan, n_signalling, n_inf, n_negative_inf, n_subnormal;
    float largest;
} pass_counts;

typedef struct boundary {
    const colibri_emulation *emulation; /* [num_hidden_layers, POINT_COUNT], or NULL: none */
    const config *config;
    colibri_watch watch;
    int n_threads;
    int64_t n_rows;            /* of a table: points outside layers, and all points in each layer, whether it has them or not */
    unsigned char *threads;    /* [n_threads, boundary_thread_bytes()]: thread_counts */
    colibri_watch_row *pass;   /* [n_rows] of the pass in progress */
    colibri_watch_row *closed; /* [n_rows] of all closed passes together; readers look within an instant */
    colibri_watch_row *spare;  /* [n_rows] as boundary_sum left it */
    int64_t n_points;          /* rows that this model has */
    pass_counts *passes;       /* [max_tokens, n_points] of each closed pass */

    /* The stage that runs. */
    int64_t layer, first_token;     /* -1 outside layers; the first token of the tile */
    const colibri_watch_row *found; /* what ended it: its first point that is not finite, or NULL */
} boundary;

/* Values of one point in rows; piece[r][c] stands at values[r * stride + c]. */
typedef struct piece {
    float *values;
    int64_t n_rows, n_cols, stride;
    int64_t first;         /* row 0 is this token of the tile, and the others follow; unless ... */
    const int32_t *tokens; /* ... this is not NULL: the session's token of each row, ascending */
    int64_t expert;        /* -1: none */
    int64_t index;         /* of column 0 among the values of its token and expert */
} piece;

/* What is emulated at a point of the stage that runs; b may be NULL. */
static inline colibri_emulation emulated(const boundary *b, point p)
{
    if (b == NULL || b->emulation == NULL)
        return (colibri_emulation){{COLIBRI_FLOAT32, false, false}, COLIBRI_FLOAT32};
    return b->emulation[(b->layer < 0 ? 0 : b->layer) * POINT_COUNT + p];
}

void boundary_piece(const boundary *b, int thread, point p, const piece *x);

/* For the functions that threads run. */
static inline void pass_boundary(const machine *m, int thread, point p, piece x)
{
    if (m->boundary != NULL)
        boundary_piece(m->boundary, thread, p, &x);
}

/* Whole contiguous rows of the tile from token `first` on, when all of them are there: split among the threads. */
void pass_rows(machine *m, point p, float *values, int64_t first, int64_t n_rows, int64_t width);

/* What a session plans for a boundary: bytes of one table, of which it has 3, of what is kept of one pass, and of one thread. */
int64_t boundary_table_bytes(const config *c);
int64_t boundary_pass_bytes(const config *c);
int64_t boundary_thread_bytes(void);

/* Does anything happen to values here? */
bool boundary_is_on(const boundary *b);
void boundary_init(boundary *b, const config *c, int n_threads, void *tables, void *passes, void *threads);

void boundary_begin_pass(boundary *b);
void boundary_begin_stage(boundary *b, int64_t layer, int64_t first_token);
bool boundary_end_stage(boundary *b, bool may_stop); /* false: it was the last of its pass, for `found` is not finite */
colibri_status boundary_fail(const boundary *b, const char *tail, colibri_message *message); /* NONFINITE, and says what */

/* Points first and later lose what they counted in this layer in the pass in progress, to count anew. */
void boundary_forget(boundary *b, point first, point last, int64_t layer);

/* The pass in progress becomes number `pass`: its counts are kept, then (within an instant) added to those of the closed ones. */
void boundary_close_pass(boundary *b, int64_t pass);
void boundary_add_pass(boundary *b);

/* The closed passes are to be the first n_passes alone, of n_tokens: their counts are summed, then (within an instant) put in
 * place. */
void boundary_sum(boundary *b, int64_t n_passes, int64_t n_tokens);
void boundary_use_sum(boundary *b);
void boundary_copy(boundary *b, const boundary *from, int64_t n_passes, int64_t n_tokens);

size_t boundary_table(const boundary *b, colibri_watch_row *out, size_t capacity); /* within an instant */

#endif
