#include "checkpoint.h"

#include "shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *checkpoint_folder(const char *path)
{
    size_t n = strlen(path);
    if (path_look(path) == PATH_FOLDER)
        return path_join(path, n > 0 && path[n - 1] == '/' ? "" : "/");
    const char *slash = strrchr(path, '/');
    if (slash == NULL)
        return path_join("./", "");
    char *folder = path_join(path, "");
    if (folder != NULL)
        folder[slash - path + 1] = '\0';
    return folder;
}

/* ---- the table ---- */

static uint64_t hash_name(const char *name)
{
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a, then a mix so that low bits depend on all of it */
    for (const unsigned char *p = (const unsigned char *)name; *p != '\0'; p++)
        hash = (hash ^ *p) * 0x100000001B3u;
    return hash ^ hash >> 32;
}

static uint32_t *find_slot(const checkpoint *c, const char *name)
{
    uint64_t slot = hash_name(name) & c->slot_mask;
    while (c->slots[slot] != 0 && strcmp(c->tensors[c->slots[slot] - 1].name, name) != 0)
        slot = (slot + 1) & c->slot_mask;
    return &c->slots[slot];
}

const tensor *checkpoint_find(const checkpoint *c, const char *name)
{
    uint32_t slot = *find_slot(c, name);
    return slot == 0 ? NULL : &c->tensors[slot - 1];
}

const char *checkpoint_file_path(const checkpoint *c, const tensor *t)
{
    return c->files[t->file].map.path;
}

static colibri_status out_of_memory(const checkpoint *c, colibri_message *message)
{
    return fail(message, COLIBRI_ERROR_MEMORY, "%s: no memory for the table of its tensors", c->folder);
}

static colibri_status build_table(checkpoint *c, colibri_message *message)
{
    for (int f = 0; f < c->n_files; f++)
        c->n_tensors += c->files[f].header.n_tensors;
    if (c->n_tensors >= UINT32_MAX / 4)
        return fail(message, COLIBRI_ERROR_UNSUPPORTED, "%s holds %lld tensors; at most 2^30 are read", c->folder,
                    (long long)c->n_tensors);
    uint64_t n_slots = 16;
    while (n_slots < (uint64_t)c->n_tensors * 2) /* at most half full */
        n_slots *= 2;
    c->slot_mask = n_slots - 1;
    c->slots = calloc(n_slots, sizeof *c->slots);
    c->tensors = malloc((size_t)(c->n_tensors + 1) * sizeof *c->tensors);
    if (c->slots == NULL || c->tensors == NULL)
        return out_of_memory(c, message);
    uint32_t n = 0;
    for (int f = 0; f < c->n_files; f++) {
        for (int64_t i = 0; i < c->files[f].header.n_tensors; i++) {
            c->tensors[n] = c->files[f].header.tensors[i];
            c->tensors[n].file = f;
            uint32_t *slot = find_slot(c, c->tensors[n].name);
            if (*slot != 0)
                return fail(message, COLIBRI_ERROR_FORMAT, "tensor \"%.200s\" is both in %s and in %s", c->tensors[n].name,
                            checkpoint_file_path(c, &c->tensors[*slot - 1]), c->files[f].map.path);
            *slot = ++n;
        }
        free(c->files[f].header.tensors); /* copied; the names stay */
        c->files[f].header.tensors = NULL;
    }
    return COLIBRI_OK;
}

/* ---- index against files ---- */

static int shard_number(const shards *s, const char *name)
{
    int first = 0, last = s->n_files - 1;
    while (first < last) { /* names are sorted, and every name of the index is among them */
        int middle = first + (last - first) / 2;
        if (strcmp(s->names[middle], name) < 0)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

static colibri_status compare_index(const checkpoint *c, const shards *s, bool *listed, colibri_message *message)
{
    char missing[1024] = "";
    int64_t n_missing = 0;
    for (const json_node *entry = json_first(s->weight_map); entry != NULL; entry = json_next(s->weight_map, entry)) {
        const tensor *t = checkpoint_find(c, entry->key);
        if (t == NULL) {
            size_t used = strlen(missing);
            if (n_missing++ < 5)
                snprintf(missing + used, sizeof missing - used, "%s\"%.150s\" (%.60s)", used == 0 ? "" : ", ", entry->key,
                         entry->as.text);
            continue;
        }
        if (t->file != shard_number(s, entry->as.text))
            return fail(message, COLIBRI_ERROR_FORMAT, "%s places tensor \"%.200s\" in %.200s, but it is in %s", s->index_path,
                        entry->key, entry->as.text, checkpoint_file_path(c, t));
        listed[t - c->tensors] = true;
    }
    if (n_missing > 0)
        return fail(message, COLIBRI_ERROR_FORMAT, "%s lists %lld tensors, %lld of them are not in their files: %s%s",
                    s->index_path, (long long)s->weight_map->as.count, (long long)n_missing, missing,
                    n_missing > 5 ? ", ..." : "");
    for (int64_t i = 0; i < c->n_tensors; i++)
        if (!listed[i])
            return fail(message, COLIBRI_ERROR_FORMAT, "%s holds tensor \"%.200s\", which %s does not list",
                        checkpoint_file_path(c, &c->tensors[i]), c->tensors[i].name, s->index_path);
    return COLIBRI_OK;
}

static colibri_status check_index(const checkpoint *c, const shards *s, colibri_message *message)
{
    bool *listed = calloc((size_t)c->n_tensors + 1, sizeof *listed);
    if (listed == NULL)
        return out_of_memory(c, message);
    colibri_status status = compare_index(c, s, listed, message);
    free(listed);
    return status;
}

static colibri_status open_files(checkpoint *c, const shards *s, colibri_message *message)
{
    c->files = calloc((size_t)s->n_files, sizeof *c->files);
    if (c->files == NULL)
        return out_of_memory(c, message);
    for (; c->n_files < s->n_files; c->n_files++) {
        char *path = path_join(c->folder, s->names[c->n_files]);
        if (path == NULL)
            return out_of_memory(c, message);
        checkpoint_file *file = &c->files[c->n_files];
        colibri_status status = mapfile_open(path, &file->map, message);
        free(path);
        TRY(status);
        status = safetensors_read(&file->map, &file->header, message);
        if (status != COLIBRI_OK)
            mapfile_close(&file->map);
        TRY(status);
    }
    TRY(build_table(c, message));
    return s->weight_map == NULL ? COLIBRI_OK : check_index(c, s, message);
}

colibri_status checkpoint_open(const char *path, checkpoint **out, colibri_message *message)
{
    *out = NULL;
    checkpoint *c = calloc(1, sizeof *c);
    if (c == NULL || (c->folder = checkpoint_folder(path)) == NULL) {
        free(c);
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory to open %s", path);
    }
    shards s;
    colibri_status status = shards_find(path, c->folder, &s, message);
    if (status == COLIBRI_OK)
        status = open_files(c, &s, message);
    shards_free(&s);
    if (status != COLIBRI_OK) {
        checkpoint_free(c);
        return status;
    }
    *out = c;
    return COLIBRI_OK;
}

void checkpoint_free(checkpoint *c)
{
    if (c == NULL)
        return;
    for (int f = 0; f < c->n_files; f++) {
        safetensors_free(&c->files[f].header);
        mapfile_close(&c->files[f].map);
    }
    free(c->files);
    free(c->tensors);
    free(c->slots);
    free(c->folder);
    free(c);
}

colibri_status checkpoint_check(const checkpoint *c, colibri_message *message)
{
    for (int f = 0; f < c->n_files; f++)
        TRY(mapfile_check(&c->files[f].map, message));
    return COLIBRI_OK;
}
