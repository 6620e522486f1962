/* tiny_checkpoint.h: a small random checkpoint, written into a folder of its own, so that C tests need no outside file.
 *
 *     tiny_checkpoint t = tiny_mixtral();
 *     tiny_checkpoint_write(&t);              config.json and model.safetensors under t.folder
 *     ... colibri_model_open(t.folder, ...)
 *     tiny_checkpoint_remove(&t);
 *
 * Any field may be changed before it is written. */
#ifndef COLIBRI_TESTS_TINY_CHECKPOINT_H
#define COLIBRI_TESTS_TINY_CHECKPOINT_H

#include <stdint.h>

typedef struct tiny_checkpoint {
    const char *model_type; /* mixtral, qwen2_moe, qwen3_moe or olmoe */
    int layers, hidden, heads, kv_heads, head_dim, vocab;
    int experts, top_k, width, shared_width;
    int dense_layer;        /* this layer is a dense one; -1: none (qwen only) */
    int window;             /* sliding window of mixtral; 0: none */
    int max_positions;
    float clip_qkv;         /* olmoe; 0: none */
    unsigned seed;
    const char *plant_tensor; /* element plant_index of this tensor is set to plant_value; NULL: none */
    int64_t plant_index;      /* -1: every element */
    float plant_value;
    char folder[256];         /* filled by write */
} tiny_checkpoint;

tiny_checkpoint tiny_mixtral(void);   /* window 5, 2 of 6 experts */
tiny_checkpoint tiny_qwen2_moe(void); /* shared expert, biases, layer 1 dense, 3 of 5 experts */
tiny_checkpoint tiny_qwen3_moe(void); /* per-head norms, head_dim of its own */
tiny_checkpoint tiny_olmoe(void);     /* full-width norms, clip */

void tiny_checkpoint_write(tiny_checkpoint *t);
void tiny_checkpoint_remove(const tiny_checkpoint *t);

uint32_t tiny_random(uint64_t *state); /* 32 well-mixed bits; the generator behind the weights */

#endif
