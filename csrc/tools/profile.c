#include "profile.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "colibri_cachelab.h"

enum { PHASES = 2 };

struct profile {
    const colibri_model *model;
    cachelab_counters counters;
    cachelab_stages stages; /* of the pass in progress */
    cachelab_work *work;
    int64_t n_layers, n_cells, top_k;
    size_t ids_kind; /* the tap of the chosen experts */
    const int32_t **ids;
    colibri_lease **leases;
    cachelab_stage_sum *sums[PHASES]; /* [n_layers + 1, CACHELAB_STAGES] */
    cachelab_amount *amounts[PHASES];
    int64_t n_tokens[PHASES];
};

static int64_t field(const colibri_model *m, const char *name)
{
    for (size_t i = 0; i < colibri_model_field_count(m); i++) {
        colibri_field f = colibri_model_field(m, i);
        if (strcmp(f.name, name) == 0)
            return f.kind == COLIBRI_FIELD_INTEGER ? f.integer : 0;
    }
    return 0;
}

static cachelab_work *work_of(const colibri_model *m, int64_t n_layers)
{
    cachelab_sizes sizes = {
        .n_layers = n_layers,
        .vocab = field(m, "vocab_size"),
        .hidden = field(m, "hidden_size"),
        .heads = field(m, "num_attention_heads"),
        .key_heads = field(m, "num_key_value_heads"),
        .head_dim = field(m, "head_dim"),
        .n_experts = field(m, "num_experts"),
        .top_k = field(m, "top_k"),
        .expert_width = field(m, "moe_intermediate_size"),
        .shared_width = field(m, "shared_expert_intermediate_size"),
        .dense_width = field(m, "intermediate_size"),
    };
    cachelab_work *work = cachelab_work_create(&sizes);
    for (int64_t l = 0; work != NULL && l < n_layers; l++) {
        colibri_layer_info info = colibri_model_layer(m, l);
        cachelab_work_layer(work, l, info.is_moe, info.has_shared_expert, info.window);
    }
    for (size_t i = 0; work != NULL && i < colibri_model_weight_count(m); i++) {
        colibri_weight w = colibri_model_weight(m, i);
        int64_t n_elements = 1;
        for (int d = 0; d < w.array.n_dims; d++)
            n_elements *= w.array.shape[d];
        cachelab_work_weight(work, w.name, n_elements, n_elements * (int64_t)colibri_dtype_size(w.array.dtype));
    }
    return work;
}

profile *profile_create(const colibri_model *model)
{
    profile *p = calloc(1, sizeof *p);
    if (p == NULL)
        return NULL;
    p->model = model;
    p->n_layers = field(model, "num_hidden_layers");
    p->n_cells = (p->n_layers + 1) * CACHELAB_STAGES;
    p->top_k = field(model, "top_k");
    cachelab_counters_open(&p->counters, cachelab_open_system_event);
    p->work = work_of(model, p->n_layers);
    p->stages = (cachelab_stages){.sums = calloc((size_t)p->n_cells, sizeof *p->stages.sums), .n_layers = p->n_layers,
                                  .counters = &p->counters};
    p->ids = calloc((size_t)p->n_layers, sizeof *p->ids);
    p->leases = calloc((size_t)p->n_layers, sizeof *p->leases);
    bool complete = p->work != NULL && p->stages.sums != NULL && p->ids != NULL && p->leases != NULL;
    for (int i = 0; i < PHASES; i++) {
        p->sums[i] = calloc((size_t)p->n_cells, sizeof *p->sums[i]);
        p->amounts[i] = calloc((size_t)p->n_cells, sizeof *p->amounts[i]);
        complete = complete && p->sums[i] != NULL && p->amounts[i] != NULL;
    }
    size_t count;
    const colibri_tap_kind *kinds = colibri_tap_kinds(&count);
    while (p->ids_kind < count && strcmp(kinds[p->ids_kind].path, "layers.{l}.moe.expert_ids") != 0)
        p->ids_kind++;
    if (complete)
        return p;
    profile_free(p);
    return NULL;
}

void profile_free(profile *p)
{
    if (p == NULL)
        return;
    cachelab_counters_close(&p->counters);
    cachelab_work_free(p->work);
    for (int i = 0; i < PHASES; i++) {
        free(p->sums[i]);
        free(p->amounts[i]);
    }
    free(p->stages.sums);
    free(p->ids);
    free(p->leases);
    free(p);
}

colibri_status profile_watch(profile *p, colibri_session *session, colibri_message *message)
{
    return colibri_session_observe(session, cachelab_stages_observe, &p->stages, message);
}

/* ---- a pass ---------------------------------------------------------------------------------------------------------------- */

static void add_sum(cachelab_stage_sum *to, const cachelab_stage_sum *from)
{
    to->calls += from->calls;
    to->seconds += from->seconds;
    for (int k = 0; k < CACHELAB_COUNTERS; k++) {
        to->counts[k].value += from->counts[k].value;
        to->counts[k].enabled += from->counts[k].enabled;
        to->counts[k].running += from->counts[k].running;
    }
}

static void add_sums(profile *p, int phase)
{
    for (int64_t i = 0; i < p->n_cells; i++) {
        add_sum(&p->sums[phase][i], &p->stages.sums[i]);
        p->stages.sums[i] = (cachelab_stage_sum){0};
    }
}

/* Tile by tile, as the pass ran: each reads the weights of its own experts. */
static void add_work(profile *p, int phase, int64_t start, int64_t stop)
{
    for (int64_t first = start, n; first < stop; first += n) {
        n = stop - first < p->stages.tile_tokens ? stop - first : p->stages.tile_tokens;
        cachelab_work_tile(p->work, first, n, first + n == stop, p->ids, p->amounts[phase]);
        for (int64_t l = 0; l < p->n_layers; l++)
            if (p->ids[l] != NULL)
                p->ids[l] += n * p->top_k;
    }
}

colibri_status profile_pass(profile *p, colibri_session *session, colibri_message *message)
{
    int64_t pass = colibri_session_pass_count(session) - 1, start, stop;
    int phase = pass > 0;
    colibri_status status = COLIBRI_OK;
    colibri_session_pass(session, pass, &start, &stop);
    for (int64_t l = 0; l < p->n_layers && status == COLIBRI_OK; l++) {
        colibri_array ids = {0};
        p->leases[l] = NULL;
        if (colibri_model_layer(p->model, l).is_moe)
            status = colibri_session_tap(session, p->ids_kind, l, 0, pass, &ids, &p->leases[l], message);
        p->ids[l] = ids.data;
    }
    if (status == COLIBRI_OK) {
        add_sums(p, phase);
        add_work(p, phase, start, stop);
        p->n_tokens[phase] += stop - start;
    }
    for (int64_t l = 0; l < p->n_layers; l++) {
        colibri_lease_release(p->leases[l]);
        p->leases[l] = NULL;
    }
    return status;
}

/* ---- the table ------------------------------------------------------------------------------------------------------------- */

static void print_row(const char *layer, const char *stage, double seconds, double cycles, cachelab_amount amount)
{
    printf("%5s  %-12s %12.3f", layer, stage, seconds * 1e6);
    if (isnan(cycles))
        printf(" %14s", "-");
    else
        printf(" %14.0f", cycles);
    printf(" %14.0f %14.0f\n", amount.flops, amount.bytes);
}

static void print_cell(const profile *p, int phase, int64_t layer, int stage)
{
    int64_t i = layer * CACHELAB_STAGES + stage;
    char name[24] = "-";
    if (p->sums[phase][i].calls == 0)
        return;
    if (layer < p->n_layers)
        snprintf(name, sizeof name, "%lld", (long long)layer);
    print_row(name, colibri_stage_name((colibri_stage)stage), p->sums[phase][i].seconds,
              cachelab_scaled(p->sums[phase][i].counts[CACHELAB_CYCLES]), p->amounts[phase][i]);
}

/* One row for each kind of stage, its layers together. */
static void print_kinds(const profile *p, int phase)
{
    for (int stage = 0; stage < CACHELAB_STAGES; stage++) {
        cachelab_amount amount = {0, 0};
        cachelab_stage_sum all = {0};
        for (int64_t i = stage; i < p->n_cells; i += CACHELAB_STAGES) {
            add_sum(&all, &p->sums[phase][i]);
            amount.flops += p->amounts[phase][i].flops;
            amount.bytes += p->amounts[phase][i].bytes;
        }
        if (all.calls > 0)
            print_row("all", colibri_stage_name((colibri_stage)stage), all.seconds, cachelab_scaled(all.counts[CACHELAB_CYCLES]),
                      amount);
    }
}

void profile_print(const profile *p)
{
    static const char *const names[PHASES] = {"prefill", "decode"};
    char reason[CACHELAB_REASON_SIZE];
    for (int phase = 0; phase < PHASES; phase++) {
        if (p->n_tokens[phase] == 0)
            continue;
        printf("profile of %s, tokens: %lld\n", names[phase], (long long)p->n_tokens[phase]);
        printf("%5s  %-12s %12s %14s %14s %14s\n", "layer", "stage", "microseconds", "cycles", "flops", "bytes");
        print_kinds(p, phase);
        print_cell(p, phase, p->n_layers, COLIBRI_STAGE_EMBED);
        for (int64_t l = 0; l < p->n_layers; l++)
            for (int stage = COLIBRI_STAGE_ATTENTION; stage <= COLIBRI_STAGE_RESIDUAL; stage++)
                print_cell(p, phase, l, stage);
        print_cell(p, phase, p->n_layers, COLIBRI_STAGE_NORM);
        print_cell(p, phase, p->n_layers, COLIBRI_STAGE_LOGITS);
    }
    printf("One run: what it touched for the first time is in its times.\n");
    if (p->counters.files[CACHELAB_CYCLES] < 0) {
        cachelab_counter_reason(p->counters.errors[CACHELAB_CYCLES], cachelab_perf_event_paranoid(), reason);
        printf("cycles: %s\n", reason);
    } else {
        printf("cycles: in user mode, of all threads; -: this counter had no turn, the CPU has fewer than are asked for\n");
    }
}
