/* lanes_batch.h: the product of many rows of x with rows of w, written once over a register of LANES floats; a part of
 * lanes_kernels.h.
 *
 * Here a register holds one lane of the definition for LANES rows of w, so a single number of x meets LANES numbers of w: the
 * second cache has little to deliver for each multiply-add. The price is a panel: PANEL rows of w, copied as float32 into the
 * order in which they are read (lane by lane, step by step of 16 columns, row by row). It pays from BATCH rows of x on.
 *
 * A pass takes one lane of a tile. Passes go through the lanes in the order in which the fold joins them, as a binary counter
 * carries: 0, 8 (joined), 4, 12 (joined, then joined with the first pair), ... So four sums an output wait, not sixteen, and the
 * last pass ends with the result. */

/* LANE_GAP, floats between a lane's end and the next lane, keeps lanes from meeting in one set of the first cache; a write that
 * goes beyond a lane's end stays within it. */
enum { BATCH = 48, PANEL = PANEL_VECS * LANES, LANE_GAP = 64 };

INLINE int64_t steps_of(int64_t n)
{
    return (n + 15) / 16;
}

/* Rows of x in the next tile when so many are left. */
INLINE int batch_tile(int64_t left)
{
    return left >= BATCH_X ? BATCH_X : BATCH_X > 4 && left >= 4 ? 4 : BATCH_X > 2 && left >= 2 ? 2 : 1;
}

/* Floats from lane to lane of n_x packed rows. */
INLINE int64_t lane_floats(int64_t n_x, int64_t n)
{
    return n_x * steps_of(n) + LANE_GAP;
}

/* to[lane * stride + step * n_rows + r] = element 16 * step + lane of the row that begins at rows[r]. Columns beyond the end
 * become zeros that no arithmetic sees. Four rows are written at a time, so up to three floats go beyond the last row, where the
 * next step overwrites them. */
INLINE void lane_by_lane(float *to, int64_t stride, const unsigned char *const *rows, const int n_rows, int64_t n,
                         const colibri_dtype dtype)
{
    for (int64_t at = 0; at < n; at += 16, to += n_rows)
        UNROLL_BY_4 for (int first = 0; first < n_rows; first += 4)
            UNROLL for (int p = 0; p < PARTS; p++) {
                const int count = lanes_of(n - at - p * LANES);
                if (count <= 0)
                    break;
                vec four[4];
                UNROLL for (int r = 0; r < 4; r++)
                    four[r] = first + r < n_rows ? v_get_as(rows[first + r] + (at + p * LANES) * size_of(dtype), dtype, count)
                                                 : v_set(0);
                v_transpose(four);
                UNROLL for (int c = 0; c < LANES; c++)
                    v_store_quad(to + (p * LANES + c) * stride + first, four[c % 4], c / 4);
            }
}

INLINE void pack_tile(float *to, const float *x, int64_t x_stride, const int n_x, int64_t n)
{
    const unsigned char *rows[BATCH_X];
    for (int t = 0; t < n_x; t++)
        rows[t] = (const unsigned char *)(x + t * x_stride);
    lane_by_lane(to, lane_floats(n_x, n), rows, n_x, n, COLIBRI_F32);
}

/* Packed rows: tile by tile, lane by lane, step by step, row by row. */
static void pack_batch(float *packed, const float *x, int64_t x_stride, int64_t m, int64_t n)
{
    for (int64_t i = 0, n_x; i < m; i += n_x, x += n_x * x_stride) {
        n_x = batch_tile(m - i);
        if (n_x == BATCH_X)
            pack_tile(packed, x, x_stride, BATCH_X, n);
        else if (BATCH_X > 4 && n_x == 4)
            pack_tile(packed, x, x_stride, 4, n);
        else if (BATCH_X > 2 && n_x == 2)
            pack_tile(packed, x, x_stride, 2, n);
        else
            pack_tile(packed, x, x_stride, 1, n);
        packed += 16 * lane_floats(n_x, n);
    }
}

/* Some rows of w, in memory and as a panel, and where their results go. */
typedef struct batch {
    float *out;
    int64_t out_stride, n_rows;
    const unsigned char *w;
    int64_t w_bytes, n; /* from row to row, columns */
    float *panel;
} batch;

/* With fewer than PANEL rows the last one stands for the missing ones too. */
INLINE void pack_panel_as(const batch *b, const colibri_dtype dtype)
{
    const unsigned char *rows[PANEL];
    for (int r = 0; r < PANEL; r++)
        rows[r] = b->w + (r < b->n_rows ? r : b->n_rows - 1) * b->w_bytes;
    lane_by_lane(b->panel, lane_floats(PANEL, b->n), rows, PANEL, b->n, dtype);
}

static void pack_panel(const batch *b, colibri_dtype dtype)
{
    if (dtype == COLIBRI_F32)
        pack_panel_as(b, COLIBRI_F32);
    else if (dtype == COLIBRI_BF16)
        pack_panel_as(b, COLIBRI_BF16);
    else
        pack_panel_as(b, COLIBRI_F16);
}

/* One lane of a tile: n_x packed rows with the panel, both from that lane's beginning on. sums, each `level` floats behind the
 * one before, are the tile's: as many join this pass as `before`, the number of passes so far, ends in ones when written binary.
 * The result waits there in turn, or goes to `out` if this is the last pass. */
INLINE void lane_pass(const batch *b, float *out, float *sums, int64_t level, int before, const float *x, const float *w,
                      const int n_x, int64_t steps)
{
    vec s[BATCH_X * PANEL_VECS], row[PANEL_VECS]; /* s[t * PANEL_VECS + v] */
    UNROLL for (int i = 0; i < n_x * PANEL_VECS; i++)
        s[i] = v_set(0);
    for (; steps > 0; steps--) {
        UNROLL for (int v = 0; v < PANEL_VECS; v++) {
            row[v] = v_load(w + v * LANES);
            v_keep(row[v]);
        }
        UNROLL for (int t = 0; t < n_x; t++) {
            vec column = v_set(x[t]);
            v_keep(column);
            UNROLL for (int v = 0; v < PANEL_VECS; v++)
                s[t * PANEL_VECS + v] = v_fma(column, row[v], s[t * PANEL_VECS + v]);
        }
        x += n_x;
        w += PANEL;
    }
    for (; before & 1; before >>= 1, sums += level)
        UNROLL for (int i = 0; i < n_x * PANEL_VECS; i++)
            s[i] = v_add(v_load(sums + i * LANES), s[i]);
    if (out == NULL) {
        UNROLL for (int i = 0; i < n_x * PANEL_VECS; i++)
            v_store(sums + i * LANES, s[i]);
        return;
    }
    UNROLL for (int t = 0; t < n_x; t++)
        UNROLL for (int v = 0; v < PANEL_VECS; v++)
            if (v * LANES < b->n_rows)
                v_put(out + t * b->out_stride + v * LANES, s[t * PANEL_VECS + v], lanes_of(b->n_rows - v * LANES));
}

/* All m rows of packed x with one panel. The rows of w that come next are fetched into the second cache meanwhile: they lie
 * behind these, and being prefetched only, may lie behind the matrix. */
static void batch_panel(const batch *b, float *sums, const float *packed, int64_t m)
{
    static const unsigned char lanes[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    const int64_t bytes = PANEL * b->w_bytes, level = m * PANEL;
    const unsigned char *next = b->w + bytes, *fetched = next;
    for (int before = 0; before < 16; before++) {
        const int lane = lanes[before];
        const float *w = b->panel + lane * lane_floats(PANEL, b->n), *x = packed;
        const int64_t steps = (b->n - lane + 15) / 16;
        for (int64_t i = 0, n_x; i < m; i += n_x) {
            n_x = batch_tile(m - i);
            for (; fetched < next + (before * m + i + n_x) * bytes / (16 * m); fetched += 64)
                __builtin_prefetch(fetched, 0, 2);
            float *out = before < 15 ? NULL : b->out + i * b->out_stride, *own = sums + i * PANEL;
            const float *column = x + lane * lane_floats(n_x, b->n);
            if (n_x == BATCH_X)
                lane_pass(b, out, own, level, before, column, w, BATCH_X, steps);
            else if (BATCH_X > 4 && n_x == 4)
                lane_pass(b, out, own, level, before, column, w, 4, steps);
            else if (BATCH_X > 2 && n_x == 2)
                lane_pass(b, out, own, level, before, column, w, 2, steps);
            else
                lane_pass(b, out, own, level, before, column, w, 1, steps);
            x += 16 * lane_floats(n_x, b->n);
        }
    }
}

/* scratch holds the sums and then the panel. */
static void batch_rows(float *out, int64_t out_stride, const float *packed, int64_t m, const matrix *w, int64_t first,
                       int64_t last, float *scratch)
{
    batch b = {.out_stride = out_stride, .w_bytes = w->cols * size_of(w->dtype), .n = w->cols};
    b.panel = scratch + 4 * m * PANEL;
    for (int64_t r = first; r < last; r += PANEL) {
        b.out = out + r;
        b.n_rows = last - r < PANEL ? last - r : PANEL;
        b.w = (const unsigned char *)w->data + r * b.w_bytes;
        pack_panel(&b, w->dtype);
        batch_panel(&b, scratch, packed, m);
    }
}
