/* colibri.h: the one public header of the Colibri engine.
 *
 * Colibri runs sparse Mixture-of-Experts language models on the CPU and keeps every intermediate value where it was computed,
 * so that it can be looked at without a copy. The header goes from simple to detailed:
 *
 *   1. status and messages      every fallible call returns a status and writes one sentence
 *   2. arrays                   how memory is described to the caller
 *   3. model                    a checkpoint, mapped read-only; shared by any number of sessions
 *   4. session                  one timeline of tokens: KV cache, tape, working memory
 *   5. taps                     the named intermediates of a session
 *   6. stepping                 a pass run stage by stage, its rows open to be looked at and edited
 *   7. points                  what is computed between taps too, watched for NaN and Inf
 *   8. this machine             which code path runs, how many threads
 *
 * Promises: the library never prints, never exits, never raises a signal, never changes the floating-point mode of the process,
 * and allocates nothing while a forward pass runs. The same ids give the same bytes for any thread count, chunking, capture
 * setting and instruction set, run through or stage by stage.
 *
 * Not promised: that two threads may use one session at once (the second gets COLIBRI_ERROR_BUSY), or that a mapped file may
 * change on disk while its model is open (size and time are checked again at each feed; what cannot be seen is not caught).
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri_config.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default) /* the library is built with hidden visibility: what stands below is all that it exports */
#endif

/* ---- 1. status and messages ------------------------------------------------------------------------------------------------ */

typedef enum colibri_status {
    COLIBRI_OK = 0,
    COLIBRI_ERROR_FILE,        /* a path is missing, unreadable, or changed while it was mapped */
    COLIBRI_ERROR_FORMAT,      /* a file's content breaks its format, or contradicts another file */
    COLIBRI_ERROR_UNSUPPORTED, /* well-formed, but an architecture, option or dtype this engine does not run */
    COLIBRI_ERROR_ARGUMENT,    /* the caller passed something out of range */
    COLIBRI_ERROR_CAPACITY,    /* the session's max_tokens would be exceeded; the session is unchanged */
    COLIBRI_ERROR_MEMORY,      /* the planned memory cannot be had; the message gives the bytes */
    COLIBRI_ERROR_BUSY,        /* another thread is inside this session, or a stepped pass is open where none may be */
    COLIBRI_ERROR_INTERRUPTED, /* the progress callback asked to stop; the session is as before the call */
    COLIBRI_ERROR_NOT_CAPTURED, /* the tap exists, but this session's capture does not keep it */
    COLIBRI_ERROR_NONFINITE    /* a stage of a session that watches for it gave a NaN or an Inf; the session is as before the call */
} colibri_status;

/* One English sentence that names the file, tensor, layer or limit at fault and the nearest valid choice.
 * Written only when a call fails. May be NULL where a message is taken. */
typedef struct colibri_message {
    char text[COLIBRI_MESSAGE_SIZE];
} colibri_message;

/* ---- 2. arrays ------------------------------------------------------------------------------------------------------------- */

typedef enum colibri_dtype {
    COLIBRI_F32 = 0,
    COLIBRI_F16,
    COLIBRI_BF16,
    COLIBRI_I32,
    COLIBRI_I64
} colibri_dtype;

size_t colibri_dtype_size(colibri_dtype dtype); /* bytes of one element */

#define COLIBRI_MAX_DIMS 4

/* A piece of memory seen as an array. `data` may be NULL only when a dimension is 0. */
typedef struct colibri_array {
    const void *data;
    colibri_dtype dtype;
    int n_dims;
    int64_t shape[COLIBRI_MAX_DIMS];
    int64_t strides[COLIBRI_MAX_DIMS]; /* in bytes */
} colibri_array;

/* Counts by bit pattern, so that no compiler flag can fold them away. */
typedef struct colibri_census {
    int64_t n_nan, n_inf, n_subnormal;
    int64_t first_nonfinite; /* flat index, -1 when there is none */
} colibri_census;

/* Writes the array's values as float32, row-major and contiguous. Widening is exact; a signalling NaN becomes quiet. Floating dtypes only. */
colibri_status colibri_array_widen(const colibri_array *array, float *out, colibri_message *message);
colibri_status colibri_array_census(const colibri_array *array, colibri_census *out, colibri_message *message);

/* Number formats that a session can emulate: float32 values of which each is one of the format's. */
typedef enum colibri_format {
    COLIBRI_FLOAT32 = 0,
    COLIBRI_FLOAT16,
    COLIBRI_BFLOAT16,
    COLIBRI_FLOAT8_E4M3FN, /* has no Inf: what is too large becomes NaN */
    COLIBRI_FLOAT8_E5M2
} colibri_format;

typedef struct colibri_rounding {
    colibri_format format;
    bool flush;    /* what is subnormal in the format becomes zero of its sign */
    bool saturate; /* Inf and what is too large becomes the format's largest number; NaN stays */
} colibri_rounding;

/* Rounds in place to the nearest number of the format, ties to even, whatever the floating-point mode of the process. */
void colibri_round(float *values, int64_t n, colibri_rounding how);

/* Memory of the engine, one mapping each. */
typedef enum colibri_page_kind {
    COLIBRI_PAGES_PLAIN = 0, /* the system's ordinary pages */
    COLIBRI_PAGES_MADVISE,   /* transparent huge pages, where the system has them when a page is first written */
    COLIBRI_PAGES_HUGETLB,   /* from the system's pool of huge pages, all taken when the block was made */
    COLIBRI_PAGES_FILE       /* of a file: the system writes them back when memory is short */
} colibri_page_kind;

typedef struct colibri_block {
    const void *data;
    int64_t n_bytes;        /* planned */
    int64_t n_mapped;       /* n_bytes rounded up to whole pages */
    colibri_page_kind pages;
    int64_t page_bytes;     /* of these pages */
    const char *why;        /* a phrase: why these pages and no others. Lives forever */
} colibri_block;

/* Mappings that the system refused to take back, since the process began: how many and their bytes. Both should be 0. */
void colibri_failed_unmaps(int64_t *count, int64_t *n_bytes);

/* ---- 3. model -------------------------------------------------------------------------------------------------------------- */

typedef struct colibri_model colibri_model;

/* Opens a folder (a single model.safetensors before an index, as transformers does), a .safetensors file or an index file beside its
 * config.json. Everything wrong is refused here, before any tensor is read; weights that hold NaN or Inf are not wrong.
 * On success *model has one reference. */
colibri_status colibri_model_open(const char *path, colibri_model **model, colibri_message *message);

/* Sessions and leases hold references of their own, so a model outlives its last user. Release accepts NULL. Any thread. */
void colibri_model_retain(colibri_model *model);
void colibri_model_release(colibri_model *model);
int64_t colibri_model_users(const colibri_model *model); /* sessions and leases alive */

/* Has a mapped file changed size or time since it was opened? FILE names it. */
colibri_status colibri_model_check_files(const colibri_model *model, colibri_message *message);

/* The configuration as a table: sizes and every named semantic option, in Hugging Face spelling where one exists. */
typedef enum colibri_field_kind {
    COLIBRI_FIELD_NONE = 0, /* the option is off; prints as None */
    COLIBRI_FIELD_BOOLEAN,  /* integer is 0 or 1 */
    COLIBRI_FIELD_INTEGER,
    COLIBRI_FIELD_REAL,
    COLIBRI_FIELD_TEXT
} colibri_field_kind;

typedef struct colibri_field {
    const char *name; /* lives as long as the model */
    colibri_field_kind kind;
    int64_t integer;
    double real;
    const char *text; /* lives as long as the model */
} colibri_field;

size_t colibri_model_field_count(const colibri_model *model);
colibri_field colibri_model_field(const colibri_model *model, size_t index);

typedef struct colibri_layer_info {
    bool is_moe;
    bool has_shared_expert;
    int64_t window; /* keys a query sees, itself included; 0 = all */
} colibri_layer_info;

colibri_layer_info colibri_model_layer(const colibri_model *model, int64_t layer); /* 0 <= layer < num_hidden_layers */

/* The weights under their canonical names (embed, layers.{l}.attn.q, layers.{l}.moe.experts.{e}.gate, a bias as name.bias ...), all [out, in].
 * Order: embed, norm, lm_head; then layer by layer attention, norms, router, experts, shared expert or dense MLP. */
typedef struct colibri_weight {
    char name[96];
    colibri_array array;  /* over the mapping; may be misaligned for its dtype when the file is */
    const char *tensor;   /* name in the checkpoint; lives as long as the model */
    const char *file;     /* path of the file that holds it */
    int64_t file_offset;  /* byte of the first element in that file */
    bool replaced;        /* array is over memory of its own (colibri_model_replace); the file holds other values */
} colibri_weight;

size_t colibri_model_weight_count(const colibri_model *model);
colibri_weight colibri_model_weight(const colibri_model *model, size_t index);

/* Puts a copy of `value` in the place of a weight, and of the weights that share its values (a tied lm_head). The file is not
 * written. The dtype and the shape are those of the weight; rows lie side by side. BUSY when the model has users. */
colibri_status colibri_model_replace(colibri_model *model, size_t index, const colibri_array *value, colibri_message *message);

/* Names of the tensors that the files hold and no computation uses, ignored as transformers ignores them: layers beyond
 * num_hidden_layers, multi-token prediction heads (mtp.), stored rotary tables. They live as long as the model. */
size_t colibri_model_unused_count(const colibri_model *model);
const char *colibri_model_unused(const colibri_model *model, size_t index);

/* Where the weight files are mapped. */
typedef struct colibri_file {
    const char *path; /* lives as long as the model */
    const void *data; /* NULL when the file is empty */
    int64_t n_bytes;
} colibri_file;

size_t colibri_model_file_count(const colibri_model *model);
colibri_file colibri_model_file(const colibri_model *model, size_t index);

/* Every block of this model's sessions that is alive, also those that only leases still keep: writes up to `capacity` and returns
 * how many there are. */
size_t colibri_model_blocks(const colibri_model *model, colibri_block *out, size_t capacity);

/* ---- 4. session ------------------------------------------------------------------------------------------------------------ */

typedef struct colibri_session colibri_session;

typedef enum colibri_gate_mode {
    COLIBRI_GATES_MODEL = 0,           /* the rule that the checkpoint's config states */
    COLIBRI_GATES_SOFTMAX,             /* p over all experts, as it stands */
    COLIBRI_GATES_SOFTMAX_RENORMALISED,/* p over all experts, divided by the sum over the chosen */
    COLIBRI_GATES_SOFTMAX_OF_CHOSEN,   /* softmax over the chosen logits only */
    COLIBRI_GATES_RAW_LOGITS           /* the logit itself: a study option, no published model does this */
} colibri_gate_mode;

/* What happens to the values of each point (7) once a stage has computed them. */
typedef enum colibri_watch {
    COLIBRI_WATCH_OFF = 0,
    COLIBRI_WATCH_COUNT, /* they are counted: colibri_session_watch */
    COLIBRI_WATCH_STOP   /* and a pass ends with NONFINITE at the first stage whose values are not all finite */
} colibri_watch;

/* What is emulated at a point (7) of a layer. Sums: of products with weights, of q and k, and weighted sums; where a point is none,
 * `accumulation` says nothing. */
typedef struct colibri_emulation {
    colibri_rounding storage;    /* its values, once they are computed */
    colibri_format accumulation; /* every partial sum on the way */
} colibri_emulation;

typedef struct colibri_session_options {
    size_t size;                /* sizeof(colibri_session_options), so that it can grow */
    const char *const *capture; /* "none", "routing", "moe", "all" or tap paths with '*'; several are joined */
    size_t n_capture;           /* 0 = {"routing"} */
    int64_t max_tokens;         /* 0 = min(max_position_embeddings, what half of the available memory holds) */
    int threads;                /* 0 = as many as this process may use; more than that would only take turns and are not made */
    colibri_gate_mode gate_mode;
    int64_t file_bytes;         /* not 0: the tape is to lie in a file (colibri_session_map), which can hold so much of it */
    colibri_watch watch;
    const colibri_emulation *emulation; /* [num_hidden_layers, points]; points outside layers count in layer 0. It is copied */
    size_t n_emulation;         /* 0 = none: everything is float32; else the number of these entries */
} colibri_session_options;

/* Plans and reserves all memory; nothing is allocated later in a forward pass. MEMORY and CAPACITY messages give the bytes. */
colibri_status colibri_session_create(colibri_model *model, const colibri_session_options *options, colibri_session **session,
                                      colibri_message *message);
void colibri_session_release(colibri_session *session); /* accepts NULL; leases live on */

/* Called a few times a second at most, on the thread that called feed, with 0 <= done < 1. Non-zero stops the pass. */
typedef int (*colibri_progress)(void *user, double done);

/* One pass: appends ids, runs the model over them, closes their rows. n >= 1. On any error the session is as it was before. */
colibri_status colibri_session_feed(colibri_session *session, const int32_t *ids, int64_t n, colibri_progress progress, void *user,
                                    colibri_message *message);

/* Abandons the rows from n_tokens on (0 = reset), and a pass that is open (6). When a lease on the tape lives, the session moves to
 * a fresh block, copies the kept rows once, and the old views keep the old block; else rows are reused in place. n_tokens must be a
 * pass boundary. */
colibri_status colibri_session_truncate(colibri_session *session, int64_t n_tokens, colibri_message *message);

/* The tape in a file: the rows are computed there, so a process that is killed leaves them. A session with file_bytes takes a pass
 * only once its tape is mapped: the file must hold colibri_session_memory.tape bytes from `offset` on, rounded up to whole pages;
 * offset is a multiple of the page size. The descriptor must be open for reading and writing, and may be closed afterwards. The
 * first n_tokens tokens (a pass boundary) are copied there, later ones and an open pass are abandoned, and who holds a lease keeps
 * the old memory. For such a session truncate, abandon and move fail with FILE, and change nothing, where others would go on in a fresh block: map it
 * to another file then. A pass whose rows the file could not take fails with FILE. Forks lie in memory. */
colibri_status colibri_session_map(colibri_session *session, int file, int64_t offset, int64_t n_tokens, colibri_message *message);

/* Where the tape keeps tap `kind` of a layer; false when it does not. Two taps that are the same rows have the same place. */
typedef struct colibri_tape_place {
    int64_t offset; /* bytes from the start of the tape */
    int64_t row_bytes;
    int64_t n_rows; /* of the whole session */
} colibri_tape_place;
bool colibri_session_place(const colibri_session *session, size_t kind, int64_t layer, colibri_tape_place *out);

int64_t colibri_session_length(const colibri_session *session); /* tokens so far */
int64_t colibri_session_max_tokens(const colibri_session *session);
int64_t colibri_session_pass_count(const colibri_session *session);
int64_t colibri_session_truncations(const colibri_session *session); /* how often rows were abandoned: passes of before may be gone */
void colibri_session_pass(const colibri_session *session, int64_t pass, int64_t *start, int64_t *stop);
int colibri_session_threads(const colibri_session *session);       /* effective; 1 in a child forked off later */
int colibri_session_threads_asked(const colibri_session *session); /* as in the options */

typedef struct colibri_session_memory {
    int64_t reserved;     /* bytes of address space planned for this session */
    int64_t tape;         /* of these: history that taps show (KV cache included) */
    int64_t kv_cache;     /* of the tape: keys and values */
    int64_t scratch;      /* of these: working memory that each pass overwrites */
    int64_t copied_bytes; /* rows copied since creation: by truncate, abandon and move under live views, and when it was forked */
} colibri_session_memory;

colibri_session_memory colibri_session_memory_use(const colibri_session *session);

enum { COLIBRI_SESSION_BLOCKS = 4 }; /* the tape, scratch, and the logits of the last pass and of the next */
void colibri_session_blocks(const colibri_session *session, colibri_block out[COLIBRI_SESSION_BLOCKS]);

/* ---- 5. taps --------------------------------------------------------------------------------------------------------------- */

/* A lease keeps one block of memory alive and its closed rows unchanged; it also counts as a user of the model. */
typedef struct colibri_lease colibri_lease;
void colibri_lease_release(colibri_lease *lease); /* accepts NULL; any thread */

/* Where the kept block begins and how long it is. A lease on a model keeps several mapped files, not one block: NULL and 0. */
void colibri_lease_range(const colibri_lease *lease, const void **data, int64_t *n_bytes);

colibri_lease *colibri_model_lease(colibri_model *model); /* for views over mapped weights; NULL when memory is short */

typedef enum colibri_scope {
    COLIBRI_SCOPE_MODEL = 0, /* one per model: embed, norm, logits */
    COLIBRI_SCOPE_LAYER,     /* one per layer */
    COLIBRI_SCOPE_MOE,       /* one per MoE layer */
    COLIBRI_SCOPE_SHARED,    /* one per MoE layer with a shared expert */
    COLIBRI_SCOPE_DENSE,     /* one per dense layer */
    COLIBRI_SCOPE_EXPERT     /* one per expert of each MoE layer; rows of one pass */
} colibri_scope;

typedef enum colibri_level {
    COLIBRI_LEVEL_NONE = 0, /* kept at every capture */
    COLIBRI_LEVEL_ROUTING,
    COLIBRI_LEVEL_MOE,
    COLIBRI_LEVEL_ALL,
    COLIBRI_LEVEL_NAMED     /* only when a pattern names it */
} colibri_level;

/* The table from which bindings and documentation are generated: a new row here appears everywhere. */
typedef struct colibri_tap_kind {
    const char *path; /* with {l} for the layer and {e} for the expert */
    colibri_scope scope;
    colibri_dtype dtype;
    colibri_level level; /* the lowest capture level that keeps it */
    const char *axes;    /* "T,H" ...: names of the dimensions */
    const char *what;    /* one phrase */
} colibri_tap_kind;

const colibri_tap_kind *colibri_tap_kinds(size_t *count);

/* The array of tap `kind` (an index into the table), layer and expert (ignored where the scope has none).
 * pass = -1: all closed rows of the session (of an expert tap: the last pass); else the rows of that pass.
 * `lease` receives a lease on the block in which the array lies. NOT_CAPTURED names the capture to ask for. */
colibri_status colibri_session_tap(colibri_session *session, size_t kind, int64_t layer, int64_t expert, int64_t pass,
                                   colibri_array *array, colibri_lease **lease, colibri_message *message);
bool colibri_session_captures(const colibri_session *session, size_t kind, int64_t layer);

/* Logits [V] of the last token of the last pass, at every capture. They never change while the lease lives. */
colibri_status colibri_session_logits(colibri_session *session, colibri_array *array, colibri_lease **lease, colibri_message *message);

/* ---- 6. stepping ----------------------------------------------------------------------------------------------------------- */

/* A stepped pass runs the stages of feed one by one and gives the same bytes. Between two stages the pass is open: its rows are not
 * among those that taps show, but can be read and changed here, and what later stages read of them is what they find. */

typedef enum colibri_stage {
    COLIBRI_STAGE_EMBED = 0,  /* embed */
    COLIBRI_STAGE_ATTENTION,  /* each layer: attn.* */
    COLIBRI_STAGE_ROUTER,     /* a mixture: the residual stream with attn.out; moe.input, router_logits, scores, expert_ids, gates */
    COLIBRI_STAGE_DISPATCHER, /* dispatch.tokens, offsets, input */
    COLIBRI_STAGE_EXPERT,     /* once for each expert that has rows: its gate, up, hidden, output */
    COLIBRI_STAGE_SHARED,     /* where the layer has one: shared.output, shared.gate */
    COLIBRI_STAGE_AGGREGATOR, /* moe.routed, moe.output */
    COLIBRI_STAGE_MLP,        /* a dense layer: the residual stream with attn.out; mlp.* */
    COLIBRI_STAGE_RESIDUAL,   /* layers.{l}.output */
    COLIBRI_STAGE_NORM,       /* norm */
    COLIBRI_STAGE_LOGITS,     /* logits */
    COLIBRI_STAGE_NONE        /* nothing is left */
} colibri_stage;

const char *colibri_stage_name(colibri_stage stage); /* "embed" ... "logits"; lives forever */

typedef struct colibri_place {
    colibri_stage stage;
    int64_t layer;  /* -1 outside layers */
    int64_t expert; /* -1 at every other stage */
} colibri_place;

/* What is told of a stage of a pass, run through or stepped. */
typedef struct colibri_stage_event {
    colibri_place place; /* expert: -1 where one stage takes all of them */
    int64_t first, n;    /* the tokens that it computes; a long pass runs in tiles, each of which has all stages */
    bool begins;         /* false: it has ended, complete or interrupted */
} colibri_stage_event;

/* Called as each stage begins and again as it ends, on the thread that called feed or step. No result depends on it. It may look at
 * the clock; it may not use the session. */
typedef void (*colibri_observer)(void *user, const colibri_stage_event *event);

/* From the next pass or step on; NULL turns it off. Forks have none. BUSY when another thread is inside the session. */
colibri_status colibri_session_observe(colibri_session *session, colibri_observer observer, void *user, colibri_message *message);

/* Opens a pass of these tokens; nothing is computed yet. Errors as of feed. The pass runs as one tile: ARGUMENT when that has
 * fewer rows. BUSY when a pass is open already, as of feed and move. */
colibri_status colibri_session_begin(colibri_session *session, const int32_t *ids, int64_t n, colibri_message *message);

/* Runs the next stage; *done (may be NULL) receives its place. After the logits the pass closes as at the end of feed. On an error
 * the place stays, and the stage runs again with the next step: INTERRUPTED; ARGUMENT when the dispatcher finds an expert id that
 * is not -1 (no expert: the slot takes part in nothing) to E - 1, or one twice in a row; FILE when a weight changed under the pass. */
colibri_status colibri_session_step(colibri_session *session, colibri_progress progress, void *user, colibri_place *done,
                                    colibri_message *message);

/* What step would run, and the rows of the open pass. False when none is open. Any thread. */
bool colibri_session_next(const colibri_session *session, colibri_place *next);
bool colibri_session_open_pass(const colibri_session *session, int64_t *start, int64_t *stop);

/* Drops the open pass, if there is one; closed rows stay. Leases on its rows keep the old block, as with truncate. */
colibri_status colibri_session_abandon(colibri_session *session, colibri_message *message);

/* Rows of the open pass of a tap that a stage has written. Where the session keeps the tap, the rows themselves: later stages and
 * writes show in them. Else a copy of working memory, in a block of its own; ARGUMENT once a later layer uses that memory.
 * NOT_CAPTURED when no whole tile of it is there (attn.weights; gate, up, hidden of experts). */
colibri_status colibri_session_open_tap(colibri_session *session, size_t kind, int64_t layer, int64_t expert, colibri_array *array,
                                        colibri_lease **lease, colibri_message *message);

/* The same where the tap is kept (else NOT_CAPTURED), to be written through, until the pass closes: move before the next one if
 * it may be written later. Not for the dispatcher's tokens and offsets. */
colibri_status colibri_session_open_edit(colibri_session *session, size_t kind, int64_t layer, int64_t expert,
                                         colibri_array *array, colibri_lease **lease, colibri_message *message);

/* Copies contiguous `rows`, of the dtype and shape that open_tap shows, into the open rows, kept or not. Not for attn.weights and
 * the dispatcher's tokens and offsets. */
colibri_status colibri_session_open_write(colibri_session *session, size_t kind, int64_t layer, int64_t expert,
                                          const colibri_array *rows, colibri_message *message);

/* Only after the router: tokens first .. first + count - 1 of the open pass choose anew by their router_logits as they stand: scores,
 * the ids of the k best (k at most the model's; other slots get id -1 and gate 0), and gates by gate_mode (COLIBRI_GATES_MODEL: the
 * session's). With keep_ids scores and ids stay, k is ignored, and gates of the experts named are computed from the logits by the
 * rule; slots of id -1 get 0 and take no part in its sum. */
colibri_status colibri_session_route_again(colibri_session *session, colibri_gate_mode gate_mode, int64_t k, int64_t first,
                                           int64_t count, bool keep_ids, colibri_message *message);

/* A session of its own with the same options and a copy of the closed rows up to n_tokens, a pass boundary; with the last logits
 * when that is the length. */
colibri_status colibri_session_fork(colibri_session *session, int64_t n_tokens, colibri_session **fork, colibri_message *message);

/* When a lease on the tape lives, the session moves to a fresh block with a copy of its rows, so that no view reaches them. */
colibri_status colibri_session_move(colibri_session *session, colibri_message *message);

/* ---- 7. points ------------------------------------------------------------------------------------------------------------- */

/* Everything a pass computes, in the order in which data flows: the taps of floating dtype and what lies between them. */
typedef struct colibri_point_kind {
    const char *path;    /* with {l} for the layer and {e} for the expert */
    colibri_stage stage; /* that computes it; layers.{l}.middle of a dense layer: the stage mlp, the tap mlp.input */
    size_t tap;          /* the tap that it is, or the first one behind it: an index into the table of taps */
} colibri_point_kind;

const colibri_point_kind *colibri_point_kinds(size_t *count);

/* What a watching session counted, by bit pattern, at a point of a layer, of all tokens of its closed passes: the same for any
 * number of threads, chunking and instruction set, but that logits count the last token of each pass alone where the session does
 * not keep them. Values count as their stage computed them; what is edited into the rows of an open pass afterwards does not.
 * Passes that were interrupted, failed or abandoned are not in it.
 *
 * The first value that is not finite is the one of the least token, then expert, then index. The index counts the values of one
 * token (and expert) at this point from 0; of attn.scores and attn.weights, where token t has t + 1 keys in each head whether a
 * window hides some or not, it is head * (t + 1) + key. */
typedef struct colibri_watch_row {
    size_t point;  /* index into the table of points */
    int64_t layer; /* -1 outside layers */
    int64_t n;     /* values */
    int64_t n_nan, n_signalling;   /* NaN; of these, signalling ones */
    int64_t n_inf, n_negative_inf; /* infinities; of these, negative ones */
    int64_t n_subnormal;
    int64_t token, expert, index;  /* of the first value that is not finite; -1: there is none, or no expert */
    float largest;                 /* finite magnitude */
    uint32_t bits;                 /* of that first value; every quiet NaN is 0x7fc00000 */
} colibri_watch_row;

/* Writes up to `capacity` rows, one for each point that this model has, layer by layer; returns how many there are, 0 when the
 * session does not watch. Any thread. */
size_t colibri_session_watch(const colibri_session *session, colibri_watch_row *out, size_t capacity);
colibri_watch colibri_session_watches(const colibri_session *session);

/* ---- 8. this machine ------------------------------------------------------------------------------------------------------- */

/* The code path in force ("avx512", "avx2", "scalar" ...). The environment variable COLIBRI_ISA forces one; an unavailable name makes
 * colibri_model_open fail with UNSUPPORTED and the list of available ones. */
const char *colibri_isa(void);
size_t colibri_isa_count(void);              /* paths that this build and this CPU can run, best first */
const char *colibri_isa_name(size_t index);

/* CPUs that this process may use: its affinity, or the quota of its control group when that is less; the environment variable
 * COLIBRI_CPUS overrides both. A session that asks for no number of threads has one for each. */
typedef struct colibri_cpus {
    int count;         /* 1 to COLIBRI_MAX_THREADS */
    const char *limit; /* what says so: "this machine", "affinity", "cgroup quota" or "COLIBRI_CPUS" */
} colibri_cpus;

colibri_cpus colibri_usable_cpus(void);
const char *colibri_version(void);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
#endif
