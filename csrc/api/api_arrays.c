#include "../kernels/kernels.h"
#include "../kernels/rounding.h"
#include "../utils/mapguard.h"
#include "../utils/status.h"

static colibri_status check_floating(const colibri_array *a, colibri_message *message)
{
    if (a->n_dims < 0 || a->n_dims > COLIBRI_MAX_DIMS)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "an array has 0 to %d dimensions, not %d", COLIBRI_MAX_DIMS, a->n_dims);
    if (a->dtype != COLIBRI_F32 && a->dtype != COLIBRI_F16 && a->dtype != COLIBRI_BF16)
        return fail(message, COLIBRI_ERROR_ARGUMENT,
                    "the array holds integers; only float32, float16 and bfloat16 have values to widen or count");
    return COLIBRI_OK;
}

/* Visits the array in row-major order, in runs of elements that lie side by side. */
typedef struct walk {
    const colibri_array *array;
    int64_t index[COLIBRI_MAX_DIMS];
    int n_outer;    /* leading dimensions that are walked one index at a time */
    int64_t n_run;  /* elements in one run; 0: the array is empty */
    bool over;
} walk;

static walk walk_begin(const colibri_array *a)
{
    walk w = {.array = a, .n_outer = a->n_dims, .n_run = 1};
    while (w.n_outer > 0 && a->strides[w.n_outer - 1] == w.n_run * (int64_t)colibri_dtype_size(a->dtype))
        w.n_run *= a->shape[--w.n_outer];
    for (int i = 0; i < a->n_dims; i++)
        w.over = w.over || a->shape[i] == 0;
    return w;
}

static const void *walk_next(walk *w)
{
    const unsigned char *run = w->array->data;
    for (int i = 0; i < w->n_outer; i++)
        run += w->index[i] * w->array->strides[i];
    int i = w->n_outer - 1;
    while (i >= 0 && ++w->index[i] == w->array->shape[i])
        w->index[i--] = 0;
    w->over = i < 0;
    return run;
}

colibri_status colibri_array_widen(const colibri_array *array, float *out, colibri_message *message)
{
    TRY(check_floating(array, message));
    mapguard_enter();
    for (walk w = walk_begin(array); !w.over; out += w.n_run) {
        const void *run = walk_next(&w);
        kernels_in_force()->widen(out, run, array->dtype, w.n_run);
    }
    mapguard_leave();
    return COLIBRI_OK;
}

colibri_status colibri_array_census(const colibri_array *array, colibri_census *out, colibri_message *message)
{
    TRY(check_floating(array, message));
    int64_t seen = 0;
    *out = (colibri_census){.first_nonfinite = -1};
    mapguard_enter();
    for (walk w = walk_begin(array); !w.over; seen += w.n_run) {
        const void *run = walk_next(&w);
        colibri_census c = census(run, array->dtype, w.n_run);
        out->n_nan += c.n_nan;
        out->n_inf += c.n_inf;
        out->n_subnormal += c.n_subnormal;
        if (out->first_nonfinite < 0 && c.first_nonfinite >= 0)
            out->first_nonfinite = seen + c.first_nonfinite;
    }
    mapguard_leave();
    return COLIBRI_OK;
}

void colibri_round(float *values, int64_t n, colibri_rounding how)
{
    round_to(values, n, how);
}
