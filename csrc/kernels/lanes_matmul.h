/* lanes_matmul.h: dot products and matrix products, written once over a register of LANES floats; a part of lanes_kernels.h.
 *
 * A tile is some rows of x by some rows of w whose sums stay in registers while both rows pass by. Sixteen lanes for every output
 * would fill the registers at once, so a tile takes one part of the lanes at a time (part p: lanes p * LANES and on) and keeps
 * the sums of each part until the fold. More outputs in a tile mean fewer loads for each product.
 *
 * Around it, what is used again stays close: a panel (a few rows of w) in the first cache while all rows of x pass over it, the
 * rows of x in the second cache while a group of panels passes over them. Long rows go in blocks of columns; the sums of a group
 * wait in memory meanwhile. From BATCH rows of x on lanes_batch.h takes over. */
#include "lanes_batch.h"

/* A panel of 12 KiB leaves room in the first cache (32 KiB) for the rows of x that pass by. 64 rows of x by 1,024 columns are 256
 * KiB, half of a usual second cache. With few rows of x memory sets the pace, and is read best in the order in which it lies.
 * GROUP rows of w wait together for the next block of columns. */
enum { BLOCK_COLS = 1024, PANEL_BYTES = 12 * 1024, FEW = 16, GROUP = 24 };

INLINE int64_t round_up(int64_t n, int64_t step)
{
    return (n + step - 1) / step * step;
}

static int64_t block_cols(int64_t m, int64_t n)
{
    const int64_t blocks = m < FEW ? 1 : (n + BLOCK_COLS - 1) / BLOCK_COLS;
    return round_up((n + blocks - 1) / blocks, 16);
}

/* Rows of x in the next tile when so many are left. */
INLINE int tile_rows(int64_t left)
{
    return left >= TILE_X ? TILE_X : TILE_X > 4 && left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* Packed rows: block of columns by block, part by part, tile by tile; within a tile step by step (16 columns), row by row, LANES
 * floats. Columns beyond the end are zeros that no arithmetic sees. */
static void pack(float *packed, const float *x, int64_t x_stride, int64_t m, int64_t n)
{
    if (m == 1) {
        memcpy(packed, x, (size_t)n * sizeof(float));
        return;
    }
    if (m >= BATCH) {
        pack_batch(packed, x, x_stride, m, n);
        return;
    }
    const int64_t block = block_cols(m, n);
    for (int64_t k = 0; k < n; k += block) {
        const int64_t end = k + block < n ? k + block : n;
        for (int p = 0; p < PARTS; p++)
            for (int64_t i = 0, n_x; i < m; i += n_x) {
                n_x = tile_rows(m - i);
                for (int64_t at = k + p * LANES; at < k + round_up(end - k, 16); at += 16)
                    for (int64_t t = i; t < i + n_x; t++, packed += LANES)
                        v_store(packed, at < end ? v_get(x + t * x_stride + at, lanes_of(end - at)) : v_set(0));
            }
    }
}

/* Where a tile's results go: out[t * out_stride + r * gap] for row t of x and row r of w. */
typedef struct place {
    float *out;
    int64_t out_stride, gap;
} place;

/* The sums of all parts of output i of the tile; those of the last part are still in registers. */
INLINE vec all_lanes(const int i, const int n, const float *sums, const vec *last)
{
    vec parts[PARTS];
    UNROLL for (int p = 0; p < PARTS - 1; p++)
        parts[p] = v_load(sums + (p * n + i) * LANES);
    parts[PARTS - 1] = last[i];
    return fold_parts(parts);
}

INLINE void fold_tile(place to, const int n_x, const int n_w, const float *sums, const vec *last)
{
    const int n = n_x * n_w;
    float dot[TILE_X * TILE_W];
    UNROLL for (int i = 0; i < n / 4 * 4; i += 4) {
        const vec four[4] = {all_lanes(i, n, sums, last), all_lanes(i + 1, n, sums, last), all_lanes(i + 2, n, sums, last),
                             all_lanes(i + 3, n, sums, last)};
        v_fold4(dot + i, four);
    }
    UNROLL for (int i = n / 4 * 4; i < n; i++)
        dot[i] = v_fold(all_lanes(i, n, sums, last));
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int r = 0; r < n_w; r++)
            to.out[t * to.out_stride + r * to.gap] = dot[t * n_w + r];
}

/* One part of the lanes of a tile over `n` columns: rows t of packed x with rows r of w, which lie w_bytes apart; both begin at
 * the first column. sums [PARTS, n_x, n_w, LANES] wait there between blocks of columns and until the last part. `begins` and
 * `ends`: these are the first, the last columns. */
INLINE void pass(float *sums, place to, const int n_x, const int n_w, const float *x, const unsigned char *w, int64_t w_bytes,
                 const colibri_dtype dtype, int64_t n, int part, bool begins, bool ends)
{
    vec s[TILE_X * TILE_W], row[TILE_W]; /* s[t * n_w + r] */
    float *const own = sums + part * n_x * n_w * LANES;
    const int rest = lanes_of(n % 16 - part * LANES);
    w += part * LANES * size_of(dtype);
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int r = 0; r < n_w; r++)
            s[t * n_w + r] = begins ? v_set(0) : v_load(own + (t * n_w + r) * LANES);
    for (int64_t k = 0; k < n / 16; k++) {
        UNROLL for (int r = 0; r < n_w; r++) {
            row[r] = v_load_as(w + r * w_bytes, dtype);
            v_keep(row[r]);
        }
        UNROLL for (int t = 0; t < n_x; t++) {
            vec column = v_load(x + t * LANES);
            v_keep(column);
            UNROLL for (int r = 0; r < n_w; r++)
                s[t * n_w + r] = v_fma(column, row[r], s[t * n_w + r]);
        }
        x += n_x * LANES;
        w += 16 * size_of(dtype);
    }
    if (rest > 0) { /* the last, incomplete group of 16: lanes beyond the end keep their sums */
        UNROLL for (int r = 0; r < n_w; r++)
            row[r] = v_get_as(w + r * w_bytes, dtype, rest);
        UNROLL for (int t = 0; t < n_x; t++)
            UNROLL for (int r = 0; r < n_w; r++)
                s[t * n_w + r] = v_first(rest, v_fma(v_load(x + t * LANES), row[r], s[t * n_w + r]), s[t * n_w + r]);
    }
    if (ends && part == PARTS - 1) {
        fold_tile(to, n_x, n_w, sums, s);
        return;
    }
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int r = 0; r < n_w; r++)
            v_store(own + (t * n_w + r) * LANES, s[t * n_w + r]);
}

/* All m rows of x and some columns of all rows of w. */
typedef struct product {
    float *out;
    int64_t out_stride, m;
    const float *x;         /* packed, these columns */
    const unsigned char *w; /* these columns of row 0 */
    int64_t w_bytes;        /* from row to row of w */
    int64_t n;              /* columns */
    colibri_dtype dtype;    /* of w */
    bool begins, ends;
} product;

/* One part of a tile: rows of x from row i on, rows of w from row `first` on, `gap` rows apart. sums are those of the panel. */
INLINE void tile(const product *b, float *sums, int64_t i, int64_t first, int64_t gap, const int n_x, const int n_w, int part,
                 const colibri_dtype dtype)
{
    const place to = {b->out + i * b->out_stride + first, b->out_stride, gap};
    const float *x = b->x + (part * b->m + i) * (round_up(b->n, 16) / 16) * LANES;
    const unsigned char *w = b->w + first * b->w_bytes;
    pass(sums + i * n_w * 16, to, n_x, n_w, x, w, gap * b->w_bytes, dtype, b->n, part, b->begins, b->ends);
}

INLINE void tile_any(const product *b, float *sums, int64_t i, int64_t first, int64_t gap, int n_x, const int n_w, int part,
                     const colibri_dtype dtype)
{
    if (n_x == TILE_X)
        tile(b, sums, i, first, gap, TILE_X, n_w, part, dtype);
    else if (TILE_X > 4 && n_x == 4)
        tile(b, sums, i, first, gap, 4, n_w, part, dtype);
    else if (TILE_X > 2 && n_x == 2)
        tile(b, sums, i, first, gap, 2, n_w, part, dtype);
    else
        tile(b, sums, i, first, gap, 1, n_w, part, dtype);
}

/* All rows of x with n_rows rows of w, `gap` rows apart, from row `first` on. Meanwhile the panel at `next`, if any, is fetched
 * into the second cache, some of it with every tile. */
INLINE void panel_as(const product *b, float *sums, int64_t first, int64_t n_rows, int64_t gap, const unsigned char *next,
                     const colibri_dtype dtype)
{
    const int64_t bytes = b->n * size_of(dtype);
    for (int p = 0; p < PARTS; p++)
        for (int64_t i = 0, n_x; i < b->m; i += n_x) {
            n_x = tile_rows(b->m - i);
            const int64_t from = bytes * (p * b->m + i) / (PARTS * b->m), to = bytes * (p * b->m + i + n_x) / (PARTS * b->m);
            for (int64_t r = 0; next != NULL && r < n_rows; r++)
                for (int64_t at = from; at < to; at += 64)
                    __builtin_prefetch(next + r * b->w_bytes + at, 0, 2);
            int64_t r = 0;
            for (; r + TILE_W <= n_rows; r += TILE_W)
                tile_any(b, sums + r * b->m * 16, i, first + r * gap, gap, (int)n_x, TILE_W, p, dtype);
            for (; r < n_rows; r++)
                tile_any(b, sums + r * b->m * 16, i, first + r * gap, gap, (int)n_x, 1, p, dtype);
        }
}

ONCE static void panel(const product *b, float *sums, int64_t first, int64_t n_rows, int64_t gap, const unsigned char *next)
{
    if (b->dtype == COLIBRI_F32)
        panel_as(b, sums, first, n_rows, gap, next, COLIBRI_F32);
    else if (b->dtype == COLIBRI_BF16)
        panel_as(b, sums, first, n_rows, gap, next, COLIBRI_BF16);
    else
        panel_as(b, sums, first, n_rows, gap, next, COLIBRI_F16);
}

/* Few rows of x: memory sets the pace, and gives most when a few streams far apart are read at once. So the rows of w are cut
 * into TILE_W runs, and a tile has one row of each. */
static void few_rows(const product *b, int64_t first, int64_t last, float *sums)
{
    const int64_t run = (last - first) / TILE_W;
    for (int64_t i = 0; i < run; i++)
        panel(b, sums, first + i, TILE_W, run, NULL);
    panel(b, sums, first + TILE_W * run, last - first - TILE_W * run, 1, NULL);
}

/* Rows first .. last of w, in one block of columns or several. The sums of each row have a place of their own. */
static void many_rows(product *b, int64_t cols, int64_t first, int64_t last, float *sums)
{
    const int64_t width = block_cols(b->m, cols), size = size_of(b->dtype), fit = PANEL_BYTES / (width * size) / TILE_W * TILE_W;
    const int64_t n_rows = fit < TILE_W ? TILE_W : fit;
    const float *const x = b->x;
    const unsigned char *const w = b->w;
    for (int64_t k = 0; k < cols; k += width) {
        b->x = x + b->m * k;
        b->w = w + k * size;
        b->n = cols - k < width ? cols - k : width;
        b->begins = k == 0;
        b->ends = k + width >= cols;
        for (int64_t r = first, now; r < last; r += now) {
            now = last - r < n_rows ? last - r : n_rows;
            /* prefetched only, so it may lie behind the matrix */
            const unsigned char *next = r + now < last ? b->w + (r + now) * b->w_bytes
                                        : b->ends      ? w + last * b->w_bytes
                                                       : w + first * b->w_bytes + (k + width) * size;
            panel(b, width < cols ? sums + (r - first) * b->m * 16 : sums, r, now, 1, next);
        }
    }
}

/* out[r] = dot(x, row r of w) for r < n_w, all lanes at once: a single row of x leaves room for them. */
INLINE void dots(float *out, const int n_w, const float *x, const unsigned char *w, int64_t w_bytes, const colibri_dtype dtype,
                 int64_t n)
{
    vec s[TILE_W1][PARTS];
    int64_t k = 0;
    UNROLL for (int r = 0; r < n_w; r++)
        UNROLL for (int p = 0; p < PARTS; p++)
            s[r][p] = v_set(0);
    for (; k + 16 <= n; k += 16)
        UNROLL for (int p = 0; p < PARTS; p++) {
            vec column = v_load(x + k + p * LANES);
            if (n_w > 1)
                v_keep(column);
            UNROLL for (int r = 0; r < n_w; r++)
                s[r][p] = v_fma(column, v_load_as(w + r * w_bytes + (k + p * LANES) * size_of(dtype), dtype), s[r][p]);
        }
    UNROLL for (int p = 0; p < PARTS; p++) {
        const int64_t at = k + p * LANES;
        const int rest = lanes_of(n - at);
        if (rest <= 0)
            break;
        const vec column = v_get(x + at, rest);
        UNROLL for (int r = 0; r < n_w; r++) {
            const vec row = v_get_as(w + r * w_bytes + at * size_of(dtype), dtype, rest);
            s[r][p] = v_first(rest, v_fma(column, row, s[r][p]), s[r][p]);
        }
    }
    UNROLL for (int r = 0; r < n_w / 4 * 4; r += 4) {
        const vec four[4] = {fold_parts(s[r]), fold_parts(s[r + 1]), fold_parts(s[r + 2]), fold_parts(s[r + 3])};
        v_fold4(out + r, four);
    }
    UNROLL for (int r = n_w / 4 * 4; r < n_w; r++)
        out[r] = v_fold(fold_parts(s[r]));
}

/* A single row of x: streams far apart, as in few_rows(). */
INLINE void single_row(const product *b, int64_t first, int64_t last, const colibri_dtype dtype)
{
    const int64_t run = (last - first) / TILE_W1;
    float dot[TILE_W1];
    for (int64_t i = first; i < first + run; i++) {
        dots(dot, TILE_W1, b->x, b->w + i * b->w_bytes, run * b->w_bytes, dtype, b->n);
        for (int r = 0; r < TILE_W1; r++)
            b->out[i + r * run] = dot[r];
    }
    for (int64_t i = first + TILE_W1 * run; i < last; i++)
        dots(b->out + i, 1, b->x, b->w + i * b->w_bytes, b->w_bytes, dtype, b->n);
}

static void matmul(float *out, int64_t out_stride, const float *packed, int64_t m, const matrix *w, const matrix *bias,
                   int64_t first, int64_t last, float *scratch)
{
    const product all = {out, out_stride, m, packed, w->data, w->cols * size_of(w->dtype), w->cols, w->dtype, true, true};
    if (m >= BATCH)
        batch_rows(out, out_stride, packed, m, w, first, last, scratch);
    else if (m > 1 && m < FEW)
        few_rows(&all, first, last, scratch);
    else if (m > 1)
        for (int64_t r = first; r < last; r += GROUP) {
            product group = all;
            many_rows(&group, w->cols, r, last - r < GROUP ? last : r + GROUP, scratch);
        }
    else if (w->dtype == COLIBRI_F32)
        single_row(&all, first, last, COLIBRI_F32);
    else if (w->dtype == COLIBRI_BF16)
        single_row(&all, first, last, COLIBRI_BF16);
    else
        single_row(&all, first, last, COLIBRI_F16);
    if (bias != NULL && bias->data != NULL)
        for (int64_t i = 0; i < m; i++)
            for (int64_t r = first; r < last; r++)
                out[i * out_stride + r] += element_f32(bias->data, bias->dtype, r);
}
