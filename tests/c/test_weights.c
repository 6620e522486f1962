/* From a checkpoint's tensors to weights: expert numbers, layouts, shapes, missing and unknown tensors, names and order. */
#include "check.h"
#include "model/weights.h"
#include "support/model_files.h"

static colibri_message message;
static folder place;
static shelf s;
static model_data *m;

static void start(int experts)
{
    place = folder_make();
    s = mixtral_shelf(experts);
}

static void finish(void)
{
    shelf_free(&s);
    folder_remove(&place);
}

static void write_model(const char *config_text)
{
    file_write_text(folder_file(&place, "config.json"), config_text);
    shelf_write(&s, folder_file(&place, "model.safetensors"));
}

static void opens(const char *config_text)
{
    write_model(config_text);
    CHECK_OK(model_data_open(place.path, &m, &message), message);
}

static void refused(colibri_status status, const char *config_text, const char *piece)
{
    write_model(config_text);
    CHECK(model_data_open(place.path, &m, &message) == status && m == NULL);
    CHECK_MESSAGE_HAS(message, piece);
}

static float at(matrix w, int64_t row, int64_t col)
{
    float value;
    CHECK(w.data != NULL && w.dtype == COLIBRI_F32 && row < w.rows && col < w.cols);
    memcpy(&value, (const char *)w.data + 4 * (row * w.cols + col), 4);
    return value;
}

static const char eleven_experts[] = "{\"model_type\":\"mixtral\",\"vocab_size\":11,\"hidden_size\":8,\"num_hidden_layers\":2,"
                                     "\"num_attention_heads\":2,\"num_key_value_heads\":1,"
                                     "\"intermediate_size\":6,\"num_local_experts\":11}";

static void test_A5_experts_are_numbered_not_sorted_as_text(void)
{
    start(11);
    opens(eleven_experts);
    for (int l = 0; l < 2; l++) {
        for (int e = 0; e < 11; e++) { /* experts.10 lies between 1 and 2 in text order */
            const ffn_weights *expert = &m->weights.layers[l].experts[e];
            CHECK(at(expert->gate, 0, 0) == (float)(10000 * l + 1000 * e + 100));
            CHECK(at(expert->down, 7, 5) == (float)(10000 * l + 1000 * e + 200 + 47));
            CHECK(at(expert->up, 1, 0) == (float)(10000 * l + 1000 * e + 300 + 8));
            CHECK(expert->gate.rows == 6 && expert->gate.cols == 8 && expert->down.rows == 8 && expert->down.cols == 6);
        }
    }
    model_data_free(m);
    finish();
}

static void test_A5_a_missing_or_oddly_numbered_expert_is_refused_by_name(void)
{
    start(11);
    shelf_tensor *t = shelf_find(&s, "model.layers.1.block_sparse_moe.experts.10.w2.weight");
    strcpy(t->name, "model.layers.1.block_sparse_moe.experts.010.w2.weight");
    refused(COLIBRI_ERROR_FORMAT, eleven_experts, "model.layers.1.block_sparse_moe.experts.10.w2.weight");
    CHECK_MESSAGE_HAS(message, "loaded 82 of 83 tensors");
    strcpy(t->name, "model.layers.1.block_sparse_moe.experts.10.w2.weight");
    shelf_add(&s, "model.layers.1.block_sparse_moe.experts.+3.w2.weight", 8, 6, 0, 0);
    refused(COLIBRI_ERROR_FORMAT, eleven_experts, "experts.+3.w2.weight");
    strcpy(s.tensors[s.n_tensors - 1].name, "model.layers.1.block_sparse_moe.experts.11.w2.weight");
    refused(COLIBRI_ERROR_FORMAT, eleven_experts, "experts.11.w2.weight");
    finish();
}

/* What transformers holds in memory: gate_up_proj [E, 2I, H] with the gate's rows first, down_proj [E, H, I]. */
static void fuse(const char *module)
{
    char name[160];
    for (int l = 0; l < 2; l++) {
        for (int e = 0; e < 4; e++) {
            for (int w = 1; w <= 3; w++) {
                snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%d.w%d.weight", l, e, w);
                shelf_drop(&s, name);
            }
        }
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.gate.weight", l);
        shelf_tensor *router = shelf_find(&s, name);
        snprintf(router->name, sizeof router->name, "model.layers.%d.%s.gate.weight", l, module);
        snprintf(name, sizeof name, "model.layers.%d.%s.experts.gate_up_proj", l, module);
        shelf_add(&s, name, 4, 12, 8, (float)(1000 * l));
        snprintf(name, sizeof name, "model.layers.%d.%s.experts.down_proj", l, module);
        shelf_add(&s, name, 4, 8, 6, (float)(5000 + 1000 * l));
    }
}

static void test_A6_fused_experts_are_slices_in_place_gate_rows_first(void)
{
    static const char *const modules[] = {"mlp", "block_sparse_moe"};
    for (int i = 0; i < 2; i++) {
        start(4);
        fuse(modules[i]);
        opens(mixtral_config);
        for (int l = 0; l < 2; l++) {
            for (int e = 0; e < 4; e++) {
                const ffn_weights *expert = &m->weights.layers[l].experts[e];
                CHECK(at(expert->gate, 0, 0) == (float)(1000 * l + e * 96));
                CHECK(at(expert->gate, 5, 7) == (float)(1000 * l + e * 96 + 47));
                CHECK(at(expert->up, 0, 0) == (float)(1000 * l + e * 96 + 48));
                CHECK(at(expert->down, 1, 2) == (float)(5000 + 1000 * l + e * 48 + 8));
            }
        }
        const size_t first = 10; /* roles before the experts of layer 0 */
        colibri_weight gate = model_data_weight(m, first), up = model_data_weight(m, first + 3 + 1);
        CHECK(strcmp(up.name, "layers.0.moe.experts.1.up") == 0 && strstr(up.tensor, "experts.gate_up_proj") != NULL);
        CHECK(up.file_offset - gate.file_offset == 4 * (96 + 48));
        model_data_free(m);
        finish();
    }
}

static void test_A6_separate_experts_are_w1_gate_w3_up_w2_down(void)
{
    start(4);
    opens(mixtral_config);
    const ffn_weights *expert = &m->weights.layers[1].experts[3];
    CHECK(at(expert->gate, 0, 0) == 13100 && at(expert->up, 0, 0) == 13300 && at(expert->down, 0, 0) == 13200);
    model_data_free(m);
    finish();
}

static void test_C5_fused_and_separate_experts_must_be_complete(void)
{
    start(4);
    fuse("mlp");
    shelf_drop(&s, "model.layers.1.mlp.experts.down_proj");
    refused(COLIBRI_ERROR_FORMAT, mixtral_config, "model.layers.1.mlp.experts.down_proj");
    shelf_add(&s, "model.layers.1.mlp.experts.down_proj", 3, 8, 6, 0);
    refused(COLIBRI_ERROR_FORMAT, mixtral_config, "has shape [3, 8, 6]; config.json asks for [4, 8, 6]");
    finish();

    start(4);
    fuse("mlp");
    shelf_tensor *t = shelf_find(&s, "model.layers.0.mlp.experts.gate_up_proj");
    t->shape[1] = 8;
    t->shape[2] = 12; /* transposed */
    refused(COLIBRI_ERROR_FORMAT, mixtral_config, "[4, 8, 12]");
    finish();

    start(3);
    refused(COLIBRI_ERROR_FORMAT, mixtral_config,
            "block_sparse_moe.gate.weight\" has shape [3, 8]; config.json asks for [4, 8] (num_experts, hidden_size)");
    finish();

    start(4);
    for (int w = 1; w <= 3; w++) {
        char name[160];
        snprintf(name, sizeof name, "model.layers.0.block_sparse_moe.experts.3.w%d.weight", w);
        shelf_drop(&s, name);
    }
    refused(COLIBRI_ERROR_FORMAT, mixtral_config, "loaded 38 of 41 tensors");
    CHECK_MESSAGE_HAS(message, "experts.3.w1.weight");
    CHECK_MESSAGE_HAS(message, "experts.3.w2.weight");
    CHECK_MESSAGE_HAS(message, "experts.3.w3.weight");
    finish();
}

static void test_J4_unknown_tensors_are_an_error_not_a_shrug(void)
{
    static const char *const names[] = {"model.layers.0.self_attn.q_norm.weight",
                                        "model.layers.0.self_attn.q_proj.bias",
                                        "model.layers.0.pre_norm.weight",
                                        "model.layers.00.input_layernorm.weight",
                                        "visual.patch.weight",
                                        "model.layers.0.self_attn.q_proj.weight_scale_inv",
                                        "model.embed_tokens",
                                        "model.layers.x.weight"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        start(4);
        shelf_add(&s, names[i], 8, 0, 0, 0);
        refused(strstr(names[i], "scale") != NULL ? COLIBRI_ERROR_UNSUPPORTED : COLIBRI_ERROR_FORMAT, mixtral_config, names[i]);
        finish();
    }
}

static void test_layers_behind_the_last_and_recomputed_tables_are_ignored_and_named(void)
{
    start(4);
    shelf_add(&s, "model.layers.2.eh_proj.weight", 3, 0, 0, 0);
    shelf_add(&s, "model.layers.61.mlp.experts.0.gate_proj.weight", 3, 0, 0, 0);
    shelf_add(&s, "mtp.layers.0.weight", 3, 0, 0, 0);
    shelf_add(&s, "model.layers.0.self_attn.rotary_emb.inv_freq", 2, 0, 0, 0);
    opens(mixtral_config);
    CHECK(m->n_unused == 4);
    for (size_t i = 0; i < m->n_unused; i++)
        CHECK(strstr("model.layers.2.eh_proj.weight model.layers.61.mlp.experts.0.gate_proj.weight mtp.layers.0.weight "
                     "model.layers.0.self_attn.rotary_emb.inv_freq",
                     model_data_unused(m, i)) != NULL);
    model_data_free(m);
    finish();
}

static void test_J4_explicit_head_dim_and_norms_of_qwen3(void)
{
    static const char text[] = "{\"model_type\":\"qwen3_moe\",\"vocab_size\":11,\"hidden_size\":8,\"num_hidden_layers\":1,\"num_"
                               "attention_heads\":2,"
                               "\"num_key_value_heads\":1,\"head_dim\":8,\"moe_intermediate_size\":6,\"num_experts\":2,\"num_"
                               "experts_per_tok\":1}";
    place = folder_make();
    s = (shelf){NULL, 0, 0};
    shelf_add(&s, "model.embed_tokens.weight", 11, 8, 0, 0);
    shelf_add(&s, "model.norm.weight", 8, 0, 0, 0);
    shelf_add(&s, "lm_head.weight", 11, 8, 0, 0);
    shelf_add(&s, "model.layers.0.self_attn.q_proj.weight", 16, 8, 0, 0);
    shelf_add(&s, "model.layers.0.self_attn.k_proj.weight", 8, 8, 0, 0);
    shelf_add(&s, "model.layers.0.self_attn.v_proj.weight", 8, 8, 0, 0);
    shelf_add(&s, "model.layers.0.self_attn.o_proj.weight", 8, 16, 0, 0);
    shelf_add(&s, "model.layers.0.self_attn.q_norm.weight", 8, 0, 0, 70);
    shelf_add(&s, "model.layers.0.self_attn.k_norm.weight", 8, 0, 0, 80);
    shelf_add(&s, "model.layers.0.input_layernorm.weight", 8, 0, 0, 0);
    shelf_add(&s, "model.layers.0.post_attention_layernorm.weight", 8, 0, 0, 0);
    shelf_add(&s, "model.layers.0.mlp.gate.weight", 2, 8, 0, 0);
    for (int e = 0; e < 2; e++) {
        static const char *const names[] = {"gate_proj", "up_proj", "down_proj"};
        for (int i = 0; i < 3; i++) {
            char name[160];
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s.weight", e, names[i]);
            shelf_add(&s, name, i == 2 ? 8 : 6, i == 2 ? 6 : 8, 0, 0);
        }
    }
    opens(text);
    CHECK(m->weights.layers[0].q.rows == 16 && m->weights.layers[0].q_norm.cols == 8 &&
          at(m->weights.layers[0].q_norm, 0, 0) == 70);
    model_data_free(m);
    shelf_drop(&s, "model.layers.0.self_attn.k_norm.weight");
    refused(COLIBRI_ERROR_FORMAT, text, "model.layers.0.self_attn.k_norm.weight");
    finish();
}

static void test_sizes_that_contradict_the_tensors_are_refused_with_both(void)
{
    static const struct { const char *from, *to, *piece;
    } cases[] = {
        {"\"vocab_size\":11", "\"vocab_size\":12",
         "model.embed_tokens.weight\" has shape [11, 8]; config.json asks for [12, 8] (vocab_size, hidden_size)"},
        {"\"num_key_value_heads\":1", "\"num_key_value_heads\":2",
         "k_proj.weight\" has shape [4, 8]; config.json asks for [8, 8]"},
        {"\"intermediate_size\":6", "\"intermediate_size\":7", "w1.weight\" has shape [6, 8]; config.json asks for [7, 8]"},
        {"\"num_hidden_layers\":2", "\"num_hidden_layers\":3", "model.layers.2.self_attn.q_proj.weight"},
        {"\"hidden_size\":8", "\"hidden_size\":2147483644", "asks for [11, 2147483644]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024];
        const char *found = strstr(mixtral_config, cases[i].from);
        CHECK(found != NULL);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(found - mixtral_config), mixtral_config, cases[i].to,
                 found + strlen(cases[i].from));
        start(4);
        refused(COLIBRI_ERROR_FORMAT, text, cases[i].piece);
        finish();
    }
    start(4);
    shelf_find(&s, "model.norm.weight")->n_dims = 2;
    shelf_find(&s, "model.norm.weight")->shape[1] = 1;
    refused(COLIBRI_ERROR_FORMAT, mixtral_config, "has shape [8, 1]; config.json asks for [8] (hidden_size)");
    finish();
}

static void test_the_dtype_is_per_tensor_and_others_are_refused_by_name(void)
{
    start(4);
    strcpy(shelf_find(&s, "model.layers.0.self_attn.q_proj.weight")->dtype, "BF16");
    strcpy(shelf_find(&s, "model.layers.1.block_sparse_moe.experts.2.w2.weight")->dtype, "F16");
    opens(mixtral_config);
    CHECK(m->weights.layers[0].q.dtype == COLIBRI_BF16 && m->weights.layers[0].k.dtype == COLIBRI_F32);
    CHECK(m->weights.layers[1].experts[2].down.dtype == COLIBRI_F16);
    model_data_free(m);
    static const char *const dtypes[] = {"F8_E4M3", "U8", "F64"};
    for (int i = 0; i < 3; i++) {
        strcpy(shelf_find(&s, "model.layers.0.self_attn.q_proj.weight")->dtype, dtypes[i]);
        refused(COLIBRI_ERROR_UNSUPPORTED, mixtral_config, dtypes[i]);
        CHECK_MESSAGE_HAS(message, "supported are F32, F16 and BF16");
    }
    finish();
}

static void test_C6_misaligned_tensors_open_where_they_lie(void)
{
    start(4);
    shelf_tensor *t =
        shelf_add(&s, "model.layers.5.odd", 1, 0, 0, 0); /* ignored, and first in the file: its size moves all others */
    strcpy(t->dtype, "U8");
    shelf_tensor first = s.tensors[0];
    s.tensors[0] = *t;
    *t = first;
    int n_misaligned = 0;
    for (int bytes = 1; bytes <= 4; bytes++) {
        s.tensors[0].shape[0] = bytes;
        opens(mixtral_config);
        n_misaligned += (uintptr_t)m->weights.layers[1].q.data % 4 != 0;
        CHECK(at(m->weights.layers[1].q, 1, 0) == 8 && at(m->weights.layers[1].experts[3].up, 0, 0) == 13300);
        model_data_free(m);
    }
    CHECK(n_misaligned == 3);
    finish();
}

static void test_a_tied_head_is_the_embedding_only_when_the_config_says_so(void)
{
    start(4);
    shelf_drop(&s, "lm_head.weight");
    refused(COLIBRI_ERROR_FORMAT, mixtral_config, "lm_head.weight (tie_word_embeddings is false");
    opens(config_with(mixtral_config, "\"tie_word_embeddings\":true,"));
    CHECK(m->weights.lm_head.data == m->weights.embed.data && m->weights.lm_head.rows == 11);
    CHECK(strcmp(model_data_weight(m, 2).name, "lm_head") == 0 && strcmp(model_data_weight(m, 2).tensor, "model.embed_tokens."
                                                                                                         "weight") == 0);
    model_data_free(m);
    shelf_add(&s, "lm_head.weight", 11, 8, 0, 500);
    opens(config_with(mixtral_config, "\"tie_word_embeddings\":true,")); /* present: used, whatever the flag says */
    CHECK(at(m->weights.lm_head, 0, 0) == 500);
    model_data_free(m);
    finish();
}

static void test_the_weight_table_has_canonical_names_in_order(void)
{
    static const char *const names[] = {"embed",
                                        "norm",
                                        "lm_head",
                                        "layers.0.attn.q",
                                        "layers.0.attn.k",
                                        "layers.0.attn.v",
                                        "layers.0.attn.o",
                                        "layers.0.attn_norm",
                                        "layers.0.moe_norm",
                                        "layers.0.moe.router",
                                        "layers.0.moe.experts.0.gate",
                                        "layers.0.moe.experts.0.up",
                                        "layers.0.moe.experts.0.down",
                                        "layers.0.moe.experts.1.gate"};
    start(4);
    opens(mixtral_config);
    CHECK(model_data_weight_count(m) == 41);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK(strcmp(model_data_weight(m, i).name, names[i]) == 0);
    colibri_weight up = model_data_weight(m, 40 - 1), norm = model_data_weight(m, 1);
    CHECK(strcmp(up.name, "layers.1.moe.experts.3.up") == 0);
    CHECK(strcmp(up.tensor, "model.layers.1.block_sparse_moe.experts.3.w3.weight") == 0 &&
          strstr(up.file, "model.safetensors") != NULL);
    CHECK(up.array.n_dims == 2 && up.array.shape[0] == 6 && up.array.shape[1] == 8 && up.array.strides[0] == 32 &&
          up.array.strides[1] == 4);
    CHECK(norm.array.n_dims == 1 && norm.array.shape[0] == 8 && norm.array.strides[0] == 4);

    FILE *file = fopen(up.file, "rb"); /* file and offset lead to the same value */
    float value = 0;
    CHECK(file != NULL && fseek(file, (long)up.file_offset, SEEK_SET) == 0 && fread(&value, 4, 1, file) == 1 && value == 13300);
    fclose(file);
    model_data_free(m);
    finish();
}

static void test_the_field_table_shows_what_is_in_force(void)
{
    start(4);
    opens(config_with(mixtral_config, "\"sliding_window\":5,"));
    static const struct { const char *name; colibri_field_kind kind; double number; const char *text;
    } wanted[] = {
        {"model_type", COLIBRI_FIELD_TEXT, 0, "mixtral"},
        {"hidden_size", COLIBRI_FIELD_INTEGER, 8, NULL},
        {"head_dim", COLIBRI_FIELD_INTEGER, 4, NULL},
        {"intermediate_size", COLIBRI_FIELD_NONE, 0, NULL},
        {"moe_intermediate_size", COLIBRI_FIELD_INTEGER, 6, NULL},
        {"gate_rule", COLIBRI_FIELD_TEXT, 0, "softmax_renormalised"},
        {"qk_norm", COLIBRI_FIELD_TEXT, 0, "none"},
        {"clip_qkv", COLIBRI_FIELD_NONE, 0, NULL},
        {"rms_norm_eps", COLIBRI_FIELD_REAL, 1e-5, NULL},
        {"rope_theta", COLIBRI_FIELD_REAL, 10000, NULL},
        {"rope_type", COLIBRI_FIELD_TEXT, 0, "default"},
        {"rope_factor", COLIBRI_FIELD_NONE, 0, NULL},
        {"rope_attention_factor", COLIBRI_FIELD_REAL, 1, NULL},
        {"top_k", COLIBRI_FIELD_INTEGER, 2, NULL},
        {"sliding_window", COLIBRI_FIELD_INTEGER, 5, NULL},
        {"tie_word_embeddings", COLIBRI_FIELD_BOOLEAN, 0, NULL},
        {"hidden_act", COLIBRI_FIELD_TEXT, 0, "silu"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        bool found = false;
        for (size_t f = 0; f < model_data_field_count(m); f++) {
            colibri_field field = model_data_field(m, f);
            if (strcmp(field.name, wanted[i].name) != 0)
                continue;
            found = true;
            CHECK(field.kind == wanted[i].kind);
            CHECK(field.kind != COLIBRI_FIELD_TEXT || strcmp(field.text, wanted[i].text) == 0);
            CHECK(field.kind != COLIBRI_FIELD_REAL || field.real == wanted[i].number);
            CHECK((field.kind != COLIBRI_FIELD_INTEGER && field.kind != COLIBRI_FIELD_BOOLEAN) ||
                  (double)field.integer == wanted[i].number);
        }
        CHECK(found);
    }
    model_data_free(m);
    finish();
}

static void test_a_path_may_name_the_folder_or_the_file_and_needs_config_json(void)
{
    start(4);
    write_model(mixtral_config);
    CHECK_OK(model_data_open(folder_file(&place, "model.safetensors"), &m, &message), message);
    CHECK_OK(model_data_check_files(m, &message), message);
    model_data_free(m);
    model_data_free(NULL);
    remove(folder_file(&place, "config.json"));
    CHECK(model_data_open(place.path, &m, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "config.json");
    CHECK(model_data_open(folder_file(&place, "absent"), &m, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "no such file or folder");
    finish();
}

static void test_a_frequency_outside_float32_is_refused(void)
{
    start(4);
    refused(COLIBRI_ERROR_FORMAT, config_with(mixtral_config, "\"rope_scaling\":{\"type\":\"linear\",\"factor\":1e300},"),
            "rotary frequency");
    finish();
}

static colibri_array array_of(const float *data, int64_t rows, int64_t cols)
{
    return (colibri_array){.data = data, .n_dims = 2, .shape = {rows, cols}, .strides = {4 * cols, 4}};
}

static size_t entry(const char *name)
{
    size_t i = 0;
    while (i < model_data_weight_count(m) && strcmp(model_data_weight(m, i).name, name) != 0)
        i++;
    CHECK(i < model_data_weight_count(m));
    return i;
}

static void test_a_replaced_weight_stands_in_memory_of_its_own_and_keeps_its_place_in_the_file(void)
{
    float values[11 * 8];
    start(4);
    opens(mixtral_config);
    size_t up = entry("layers.1.moe.experts.2.up");
    colibri_weight before = model_data_weight(m, up);
    for (int round = 0; round < 2; round++) { /* a second one takes the place of the first */
        for (int i = 0; i < 6 * 8; i++)
            values[i] = (float)(round * 100 - i);
        colibri_array array = array_of(values, 6, 8);
        CHECK_OK(model_data_replace(m, up, &array, &message), message);
        values[1] = 0;
        colibri_weight after = model_data_weight(m, up);
        CHECK(after.replaced && !before.replaced && after.array.data != before.array.data);
        CHECK(after.file_offset == before.file_offset && strcmp(after.tensor, before.tensor) == 0);
        CHECK(at(m->weights.layers[1].experts[2].up, 0, 1) == (float)(round * 100 - 1));
        CHECK(m->weights.layers[1].experts[2].up.data == after.array.data);
    }
    CHECK(!model_data_weight(m, entry("layers.1.moe.experts.1.up")).replaced);
    colibri_array wide = array_of(values, 8, 6);
    CHECK(model_data_replace(m, up, &wide, &message) == COLIBRI_ERROR_ARGUMENT);
    CHECK_MESSAGE_HAS(message, "layers.1.moe.experts.2.up is float32 [6, 8]");
    CHECK_MESSAGE_HAS(message, "not float32 [8, 6]");
    wide.dtype = COLIBRI_BF16;
    CHECK(model_data_replace(m, up, &wide, &message) == COLIBRI_ERROR_ARGUMENT);
    model_data_free(m);
    finish();
}

static void test_replacing_a_tied_embedding_replaces_the_head(void)
{
    float values[11 * 8] = {5};
    start(4);
    shelf_drop(&s, "lm_head.weight");
    opens(config_with(mixtral_config, "\"tie_word_embeddings\":true,"));
    colibri_array array = array_of(values, 11, 8);
    CHECK_OK(model_data_replace(m, entry("lm_head"), &array, &message), message);
    CHECK_OK(model_data_replace(m, entry("embed"), &array, &message), message);
    CHECK(m->weights.embed.data == m->weights.lm_head.data && at(m->weights.embed, 0, 0) == 5);
    model_data_free(m); /* once */
    finish();
}

int main(void)
{
    RUN(test_A5_experts_are_numbered_not_sorted_as_text);
    RUN(test_A5_a_missing_or_oddly_numbered_expert_is_refused_by_name);
    RUN(test_A6_fused_experts_are_slices_in_place_gate_rows_first);
    RUN(test_A6_separate_experts_are_w1_gate_w3_up_w2_down);
    RUN(test_C5_fused_and_separate_experts_must_be_complete);
    RUN(test_J4_unknown_tensors_are_an_error_not_a_shrug);
    RUN(test_layers_behind_the_last_and_recomputed_tables_are_ignored_and_named);
    RUN(test_J4_explicit_head_dim_and_norms_of_qwen3);
    RUN(test_sizes_that_contradict_the_tensors_are_refused_with_both);
    RUN(test_the_dtype_is_per_tensor_and_others_are_refused_by_name);
    RUN(test_C6_misaligned_tensors_open_where_they_lie);
    RUN(test_a_tied_head_is_the_embedding_only_when_the_config_says_so);
    RUN(test_the_weight_table_has_canonical_names_in_order);
    RUN(test_the_field_table_shows_what_is_in_force);
    RUN(test_a_path_may_name_the_folder_or_the_file_and_needs_config_json);
    RUN(test_a_frequency_outside_float32_is_refused);
    RUN(test_a_replaced_weight_stands_in_memory_of_its_own_and_keeps_its_place_in_the_file);
    RUN(test_replacing_a_tied_embedding_replaces_the_head);
    return 0;
}
