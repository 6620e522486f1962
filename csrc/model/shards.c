#include "shards.h"

#include "foreign.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char single_name[] = "model.safetensors", index_name[] = "model.safetensors.index.json";

char *path_join(const char *folder, const char *name)
{
    size_t n_folder = strlen(folder), n_name = strlen(name);
    char *path = malloc(n_folder + n_name + 1);
    if (path != NULL) {
        memcpy(path, folder, n_folder);
        memcpy(path + n_folder, name, n_name + 1);
    }
    return path;
}

static bool ends_with(const char *text, const char *ending)
{
    size_t n = strlen(text), n_ending = strlen(ending);
    return n >= n_ending && strcmp(text + n - n_ending, ending) == 0;
}

static colibri_status out_of_memory(colibri_message *message)
{
    return fail(message, COLIBRI_ERROR_MEMORY, "no memory for the list of model files");
}

/* ---- a folder without weights: say what it holds instead ---- */

typedef struct findings {
    char safetensors[256], pickle[256], gguf[256];
} findings;

static bool note_file(void *user, const char *name)
{
    findings *found = user;
    if (ends_with(name, ".safetensors"))
        snprintf(found->safetensors, sizeof found->safetensors, "%s", name);
    else if (ends_with(name, ".bin") || ends_with(name, ".pt") || ends_with(name, ".pth") || ends_with(name, ".ckpt"))
        snprintf(found->pickle, sizeof found->pickle, "%s", name);
    else if (ends_with(name, ".gguf"))
        snprintf(found->gguf, sizeof found->gguf, "%s", name);
    return true;
}

static colibri_status refuse_folder(const char *folder, colibri_message *message)
{
    findings found = {"", "", ""};
    path_list(folder, note_file, &found);
    if (found.safetensors[0] != '\0')
        return fail(message, COLIBRI_ERROR_FILE, "%s has neither %s nor %s, but it has %s: open that file by its path", folder,
                    single_name, index_name, found.safetensors);
    if (found.pickle[0] != '\0')
        return fail(message, COLIBRI_ERROR_UNSUPPORTED,
                    "%s holds its weights in %s, a PyTorch pickle; only safetensors are read (save the model "
                    "again with safe_serialization)",
                    folder, found.pickle);
    if (found.gguf[0] != '\0')
        return fail(message, COLIBRI_ERROR_UNSUPPORTED, "%s holds its weights in %s, a GGUF file; only safetensors are read",
                    folder, found.gguf);
    return fail(message, COLIBRI_ERROR_FILE, "%s has no weights: neither %s nor %s", folder, single_name, index_name);
}

/* ---- the index ---- */

/* A relative path that does not climb out of the folder. A symbolic link there is fine: download caches are made of them. */
static bool stays_inside(const char *name)
{
    if (name[0] == '\0' || name[0] == '/' || strchr(name, '\\') != NULL)
        return false;
    for (const char *part = name; part != NULL; part = strchr(part, '/')) {
        part += *part == '/';
        size_t length = strcspn(part, "/");
        if (length == 0 || (length == 1 && part[0] == '.') || (length == 2 && part[0] == '.' && part[1] == '.'))
            return false;
    }
    return true;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static colibri_status list_shards(shards *s, colibri_message *message)
{
    const json_node *map = json_member(s->index.nodes, "weight_map");
    if (map == NULL || map->kind != JSON_OBJECT || map->as.count == 0)
        return fail(message, COLIBRI_ERROR_FORMAT, "%s: \"weight_map\" must be an object that gives each tensor's file",
                    s->index_path);
    s->names = malloc((size_t)map->as.count * sizeof *s->names);
    if (s->names == NULL)
        return out_of_memory(message);
    size_t n = 0;
    for (const json_node *entry = json_first(map); entry != NULL; entry = json_next(map, entry)) {
        if (entry->kind != JSON_STRING)
            return fail(message, COLIBRI_ERROR_FORMAT, "%s: the file of tensor \"%.200s\" must be a string, not %s",
                        s->index_path, entry->key, json_kind_name(entry->kind));
        if (n == 0 || strcmp(s->names[n - 1], entry->as.text) != 0) /* neighbours mostly share their file */
            s->names[n++] = entry->as.text;
    }
    qsort(s->names, n, sizeof *s->names, compare_names);
    for (size_t i = 0; i < n; i++) {
        if (s->n_files > 0 && strcmp(s->names[s->n_files - 1], s->names[i]) == 0)
            continue;
        if (!stays_inside(s->names[i]))
            return fail(message, COLIBRI_ERROR_FORMAT,
                        "%s: the shard name \"%.200s\" leaves the folder of the model; a plain file name was expected",
                        s->index_path, s->names[i]);
        s->names[s->n_files++] = s->names[i];
    }
    s->weight_map = map;
    return COLIBRI_OK;
}

/* All missing files at once, so that one download repairs the folder. */
static colibri_status require_shards(const shards *s, const char *folder, colibri_message *message)
{
    char missing[1024] = "";
    int n_missing = 0;
    for (int i = 0; i < s->n_files; i++) {
        char *path = path_join(folder, s->names[i]);
        if (path == NULL)
            return out_of_memory(message);
        if (path_look(path) == PATH_MISSING) {
            size_t used = strlen(missing);
            snprintf(missing + used, sizeof missing - used, "%s%s", n_missing == 0 ? "" : ", ", s->names[i]);
            n_missing++;
        }
        free(path);
    }
    if (n_missing == 0)
        return COLIBRI_OK;
    return fail(message, COLIBRI_ERROR_FILE, "%s names %d files, %d of them %s missing from %s: %s", s->index_path, s->n_files,
                n_missing, n_missing == 1 ? "is" : "are", folder, missing);
}

static colibri_status read_index(shards *s, const char *folder, colibri_message *message)
{
    mapfile file;
    TRY(mapfile_open(s->index_path, &file, message));
    const char *kind = foreign_kind(file.data, file.n_bytes);
    colibri_status status = kind != NULL
                                ? fail(message, COLIBRI_ERROR_FORMAT, "%s is %s", s->index_path, kind)
                                : json_parse((const char *)file.data, (size_t)file.n_bytes, s->index_path, &s->index, message);
    mapfile_close(&file);
    TRY(status);
    TRY(list_shards(s, message));
    return require_shards(s, folder, message);
}

/* ---- from a path ---- */

static colibri_status use_single(shards *s, const char *name, colibri_message *message)
{
    s->names = malloc(sizeof *s->names);
    s->index.strings = path_join("", name); /* owns the name, as an index owns those of its shards */
    if (s->names == NULL || s->index.strings == NULL)
        return out_of_memory(message);
    s->names[0] = s->index.strings;
    s->n_files = 1;
    return COLIBRI_OK;
}

static colibri_status use_index(shards *s, const char *folder, const char *name, colibri_message *message)
{
    s->index_path = path_join(folder, name);
    return s->index_path == NULL ? out_of_memory(message) : read_index(s, folder, message);
}

static colibri_status find_in_folder(shards *s, const char *folder, colibri_message *message)
{
    const char *const names[] = {single_name, index_name};
    for (int i = 0; i < 2; i++) {
        char *path = path_join(folder, names[i]);
        if (path == NULL)
            return out_of_memory(message);
        bool present = path_look(path) != PATH_MISSING;
        free(path);
        if (present)
            return i == 0 ? use_single(s, single_name, message) : use_index(s, folder, index_name, message);
    }
    return refuse_folder(folder, message);
}

colibri_status shards_find(const char *path, const char *folder, shards *out, colibri_message *message)
{
    memset(out, 0, sizeof *out);
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    colibri_status status;
    if (path_look(path) == PATH_FOLDER)
        status = find_in_folder(out, folder, message);
    else if (ends_with(name, ".json"))
        status = use_index(out, folder, name, message);
    else
        status = use_single(out, name, message);
    if (status != COLIBRI_OK)
        shards_free(out);
    return status;
}

void shards_free(shards *s)
{
    free(s->names);
    free(s->index_path);
    json_free(&s->index);
    memset(s, 0, sizeof *s);
}
