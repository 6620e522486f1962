/* lanes_matmul.h: dot products and matrix products, written once over a register of LANES floats; a part of lanes_kernels.h.
 *
 * A tile is some rows of x by some rows of w whose sums stay in registers while both rows pass by. Sixteen lanes for every output
 * would fill the registers at once, so a tile takes one part of the lanes at a time (part p: lanes p * LANES and on) and keeps the
 * sums of each part until the fold. More outputs in a tile mean fewer loads for each product.
 *
 * Around it, what is used again stays close: a panel (a few rows of w) in the first cache while all rows of x pass over it, the
 * rows of x in the second cache while a group of panels passes over them. Long rows go in blocks of columns; the sums of a group
 * wait in memory meanwhile. */

/* A panel of 12 KiB leaves room in the first cache (32 KiB) for the rows of x that pass by. 64 rows of x by 1,024 columns are 256
 * KiB, half of a usual second cache. With few rows of x memory sets the pace, and is read best in the order in which it lies. */
enum { BLOCK_COLS = 1024, PANEL_BYTES = 12 * 1024, FEW = 16, BEGINNING = 256 };

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

/* out[t * out_stride + r]: the last part's sums, which are still in registers, join those of the parts before. */
INLINE void fold_tile(float *out, int64_t out_stride, const int n_x, const int n_w, const float *sums,
                      vec last[TILE_X][TILE_W], const float *bias)
{
    const int n = n_x * n_w;
    float dot[TILE_X * TILE_W];
    UNROLL for (int i = 0; i < n; i += i + 4 <= n ? 4 : 1) {
        const int n_now = i + 4 <= n ? 4 : 1;
        vec sum[4];
        UNROLL for (int j = 0; j < n_now; j++) {
            vec parts[PARTS];
            UNROLL for (int p = 0; p < PARTS - 1; p++)
                parts[p] = v_load(sums + ((p - (PARTS - 1)) * n + i + j) * LANES);
            parts[PARTS - 1] = last[(i + j) / n_w][(i + j) % n_w];
            sum[j] = fold_parts(parts);
        }
        if (n_now == 4)
            v_fold4(dot + i, sum);
        else
            dot[i] = v_fold(sum[0]);
    }
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int r = 0; r < n_w; r++)
            out[t * out_stride + r] = bias == NULL ? dot[t * n_w + r] : dot[t * n_w + r] + bias[r];
}

/* One part of a tile over `n` columns: sums[t][r] (LANES floats each) of row t of the packed x and row r of w, which lie w_bytes
 * apart. x and w begin at the part's first lane. */
INLINE void pass(float *sums, const int n_x, const int n_w, const float *x, const unsigned char *w, int64_t w_bytes,
                 const colibri_dtype dtype, int64_t n, int part, bool begins, float *out, int64_t out_stride,
                 const float *bias)
{
    vec s[TILE_X][TILE_W], row[TILE_W];
    const int64_t step = 16 * size_of(dtype);
    const int rest = lanes_of(n % 16 - part * LANES);
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int r = 0; r < n_w; r++)
            s[t][r] = begins ? v_set(0) : v_load(sums + (t * n_w + r) * LANES);
    for (int64_t k = 0; k < n / 16; k++) {
        UNROLL for (int r = 0; r < n_w; r++) {
            row[r] = v_load_as(w + r * w_bytes, dtype);
            v_keep(row[r]);
        }
        UNROLL for (int t = 0; t < n_x; t++) {
            vec column = v_load(x + t * LANES);
            v_keep(column);
            UNROLL for (int r = 0; r < n_w; r++)
                s[t][r] = v_fma(column, row[r], s[t][r]);
        }
        x += n_x * LANES;
        w += step;
    }
    if (rest > 0) { /* the last, incomplete group of 16: lanes beyond the end keep their sums */
        UNROLL for (int r = 0; r < n_w; r++)
            row[r] = v_get_as(w + r * w_bytes, dtype, rest);
        UNROLL for (int t = 0; t < n_x; t++)
            UNROLL for (int r = 0; r < n_w; r++)
                s[t][r] = v_first(rest, v_fma(v_load(x + t * LANES), row[r], s[t][r]), s[t][r]);
    }
    if (out == NULL) {
        UNROLL for (int t = 0; t < n_x; t++)
            UNROLL for (int r = 0; r < n_w; r++)
                v_store(sums + (t * n_w + r) * LANES, s[t][r]);
        return;
    }
    fold_tile(out, out_stride, n_x, n_w, sums, s, bias);
}

/* What one call of panel() works on: `n` columns from column k of `rows` rows of w, and as many of all m rows of x. */
typedef struct work {
    float *out;              /* of the panel's first row */
    int64_t out_stride, m;
    const float *x;          /* packed, this block */
    const unsigned char *w;  /* the panel's first row, this block */
    int64_t w_bytes, n, rows;
    const unsigned char *next; /* the panel after this one, to be fetched meanwhile */
    const float *bias;       /* of the panel's first row, or NULL */
    float *sums;
    bool begins, ends;       /* the first, the last block of columns */
} work;

INLINE void tile(const work *j, int64_t i, int64_t r, const int n_x, const int n_w, int part, const colibri_dtype dtype)
{
    float *sums = j->sums + (r * j->m + i * n_w) * 16 + part * n_x * n_w * LANES;
    pass(sums, n_x, n_w, j->x + (part * j->m + i) * (round_up(j->n, 16) / 16) * LANES,
         j->w + r * j->w_bytes + part * LANES * size_of(dtype), j->w_bytes, dtype, j->n, part, j->begins,
         j->ends && part == PARTS - 1 ? j->out + i * j->out_stride + r : NULL, j->out_stride, j->bias == NULL ? NULL : j->bias + r);
}

INLINE void tile_any(const work *j, int64_t i, int64_t r, int n_x, const int n_w, int part, const colibri_dtype dtype)
{
    if (n_x == TILE_X)
        tile(j, i, r, TILE_X, n_w, part, dtype);
    else if (TILE_X > 4 && n_x == 4)
        tile(j, i, r, 4, n_w, part, dtype);
    else if (TILE_X > 2 && n_x == 2)
        tile(j, i, r, 2, n_w, part, dtype);
    else
        tile(j, i, r, 1, n_w, part, dtype);
}

INLINE void panel(const work *j, const colibri_dtype dtype)
{
    /* With few rows of x memory sets the pace, and the hardware's own prefetch needs only to be shown where rows begin. */
    const int64_t bytes = j->n * size_of(dtype), shown = j->m < FEW && bytes > BEGINNING ? BEGINNING : bytes;
    for (int p = 0; p < PARTS; p++)
        for (int64_t i = 0, n_x; i < j->m; i += n_x) {
            n_x = tile_rows(j->m - i);
            const int64_t from = shown * (p * j->m + i) / (PARTS * j->m), to = shown * (p * j->m + i + n_x) / (PARTS * j->m);
            for (int64_t r = 0; r < j->rows; r++)
                for (int64_t at = from; at < to; at += 64)
                    __builtin_prefetch(j->next + r * j->w_bytes + at, 0, 2);
            int64_t r = 0;
            for (; r + TILE_W <= j->rows; r += TILE_W)
                tile_any(j, i, r, (int)n_x, TILE_W, p, dtype);
            for (; r < j->rows; r++)
                tile_any(j, i, r, (int)n_x, 1, p, dtype);
        }
}

INLINE void matmul_rows(float *out, int64_t out_stride, const float *packed, int64_t m, const matrix *w, const float *bias,
                        int64_t first, int64_t last, float *sums, const colibri_dtype dtype)
{
    const int64_t block = block_cols(m, w->cols), w_bytes = w->cols * size_of(dtype);
    const int64_t fit = PANEL_BYTES / (block * size_of(dtype)) / TILE_W * TILE_W, rows = fit < TILE_W ? TILE_W : fit;
    const unsigned char *const data = w->data;
    for (int64_t k = 0; k < w->cols; k += block)
        for (int64_t r = first; r < last; r += rows) {
            work j = {.out = out + r,
                      .out_stride = out_stride,
                      .m = m,
                      .x = packed + m * k,
                      .w = data + r * w_bytes + k * size_of(dtype),
                      .w_bytes = w_bytes,
                      .n = w->cols - k < block ? w->cols - k : block,
                      .rows = last - r < rows ? last - r : rows,
                      .bias = bias == NULL ? NULL : bias + (r - first),
                      .sums = block < w->cols ? sums + (r - first) * m * 16 : sums,
                      .begins = k == 0,
                      .ends = k + block >= w->cols};
            j.next = r + rows < last ? j.w + rows * w_bytes : j.ends ? data + last * w_bytes : data + first * w_bytes + (k + block) * size_of(dtype);
            panel(&j, dtype);
        }
}

/* out[r] = dot(x, row r of w) (+ bias[r]) for r < n_w, all lanes at once: a single row of x leaves room for them. */
INLINE void dots(float *out, const int n_w, const float *x, const unsigned char *w, int64_t w_bytes, const colibri_dtype dtype,
                 int64_t n, const float *bias)
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
        UNROLL for (int r = 0; r < n_w; r++)
            s[r][p] = v_first(rest, v_fma(column, v_get_as(w + r * w_bytes + at * size_of(dtype), dtype, rest), s[r][p]), s[r][p]);
    }
    UNROLL for (int r = 0; r < n_w; r++) {
        const float dot = fold16(s[r]);
        out[r] = bias == NULL ? dot : dot + bias[r];
    }
}

INLINE void matmul_row(float *out, const float *x, const matrix *w, const float *bias, int64_t first, int64_t last,
                       const colibri_dtype dtype)
{
    const int64_t w_bytes = w->cols * size_of(dtype);
    for (int64_t r = first; r < last;) {
        const unsigned char *row = (const unsigned char *)w->data + r * w_bytes;
        const float *added = bias == NULL ? NULL : bias + (r - first);
        const bool whole = r + TILE_W1 <= last;
        for (int64_t next = TILE_W1; next < 2 * TILE_W1; next++)
            for (int64_t at = 0; at < w_bytes && at < BEGINNING; at += 64)
                __builtin_prefetch(row + next * w_bytes + at, 0, 2);
        if (whole)
            dots(out + r, TILE_W1, x, row, w_bytes, dtype, w->cols, added);
        else
            dots(out + r, 1, x, row, w_bytes, dtype, w->cols, added);
        r += whole ? TILE_W1 : 1;
    }
}

INLINE void matmul_as(float *out, int64_t out_stride, const float *packed, int64_t m, const matrix *w, const matrix *bias,
                      int64_t first, int64_t last, float *sums, const colibri_dtype dtype)
{
    float added[MATMUL_GROUP];
    const bool biased = bias != NULL && bias->data != NULL;
    for (int64_t r = first; r < last; r += MATMUL_GROUP) {
        const int64_t end = r + MATMUL_GROUP < last ? r + MATMUL_GROUP : last;
        for (int64_t j = r; biased && j < end; j++)
            added[j - r] = element_f32(bias->data, bias->dtype, j);
        if (m == 1)
            matmul_row(out, packed, w, biased ? added : NULL, r, end, dtype);
        else
            matmul_rows(out, out_stride, packed, m, w, biased ? added : NULL, r, end, sums, dtype);
    }
}

static void matmul(float *out, int64_t out_stride, const float *packed, int64_t m, const matrix *w, const matrix *bias,
                   int64_t first, int64_t last, float *sums)
{
    if (w->dtype == COLIBRI_F32)
        matmul_as(out, out_stride, packed, m, w, bias, first, last, sums, COLIBRI_F32);
    else if (w->dtype == COLIBRI_BF16)
        matmul_as(out, out_stride, packed, m, w, bias, first, last, sums, COLIBRI_BF16);
    else
        matmul_as(out, out_stride, packed, m, w, bias, first, last, sums, COLIBRI_F16);
}
