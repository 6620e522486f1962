#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "atomics.h"
#include "instant.h"
#include "mapguard.h"
#include "pages.h"
#include "system_file.h"

struct block {
    pages pages;
    int64_t n_bytes;    /* as asked for */
    int64_t references; /* atomic */
    const void *owner;
    block *previous, *next; /* in the list of all blocks, which instant.h guards */
};

static block *first_block;

static void enlist(block *b)
{
    instant_begin();
    b->next = first_block;
    if (first_block != NULL)
        first_block->previous = b;
    first_block = b;
    instant_end();
}

static void strike(block *b)
{
    instant_begin();
    if (b->next != NULL)
        b->next->previous = b->previous;
    *(b->previous != NULL ? &b->previous->next : &first_block) = b->next;
    instant_end();
}

static colibri_status block_over(const pages *p, int64_t n_bytes, const void *owner, block **out, colibri_message *message)
{
    block *b = calloc(1, sizeof *b);
    if (b == NULL) {
        pages_unmap(p);
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a block's record");
    }
    b->pages = *p;
    b->n_bytes = n_bytes;
    b->references = 1;
    b->owner = owner;
    enlist(b);
    *out = b;
    return COLIBRI_OK;
}

colibri_status block_create(int64_t n_bytes, block_use use, const void *owner, block **out, colibri_message *message)
{
    pages p;
    *out = NULL;
    TRY(pages_map(n_bytes, use == BLOCK_WORK, &p, message));
    return block_over(&p, n_bytes, owner, out, message);
}

colibri_status block_of_file(int64_t n_bytes, int file, int64_t offset, const void *owner, block **out, colibri_message *message)
{
    pages p;
    *out = NULL;
    TRY(pages_map_file(n_bytes, file, offset, &p, message));
    TRY(block_over(&p, n_bytes, owner, out, message));
    colibri_status status = mapguard_add(p.data, p.n_bytes, message);
    if (status != COLIBRI_OK) {
        block_release(*out);
        *out = NULL;
    }
    return status;
}

void block_retain(block *b)
{
    atomic_add(&b->references, 1);
}

void block_release(block *b)
{
    if (b == NULL || atomic_add(&b->references, -1) != 0)
        return;
    strike(b);
    mapguard_remove(b->pages.data);
    pages_unmap(&b->pages);
    free(b);
}

int64_t block_references(const block *b)
{
    return atomic_load_acquire(&b->references);
}

unsigned char *block_data(block *b)
{
    return b->pages.data;
}

int64_t block_bytes(const block *b)
{
    return b->n_bytes;
}

colibri_block block_describe(const block *b)
{
    const pages *p = &b->pages;
    return (colibri_block){p->data, b->n_bytes, p->n_bytes, p->kind, p->page_bytes, p->why};
}

size_t blocks_of(const void *owner, colibri_block *out, size_t capacity)
{
    size_t n = 0;
    instant_begin();
    for (const block *b = first_block; b != NULL; b = b->next)
        if (b->owner == owner && n++ < capacity)
            out[n - 1] = block_describe(b);
    instant_end();
    return n;
}

int64_t plan_take(plan *p, int64_t count, int64_t element_size)
{
    const int64_t line = 64; /* a cache line, and the widest vector register */
    int64_t offset = p->n_bytes;
    if (offset < 0 || count < 0 || element_size < 0 || (element_size > 0 && count > (INT64_MAX - line) / element_size) ||
        offset > INT64_MAX - line - count * element_size) {
        p->n_bytes = -1;
        return -1;
    }
    p->n_bytes = (offset + count * element_size + line - 1) / line * line;
    return offset;
}

/* ---- how much memory is left ---- */

static int64_t smaller(int64_t a, int64_t b) /* -1: unknown */
{
    return a < 0 ? b : b < 0 ? a : a < b ? a : b;
}

/* Limit minus use of one control group. Pages of inactive files count as used but are given back when memory is short. */
static int64_t cgroup_headroom(const char *folder, const char *limit_name, const char *use_name, const char *stat_key)
{
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", folder, limit_name);
    int64_t limit = system_number(path, NULL);
    snprintf(path, sizeof path, "%s/%s", folder, use_name);
    int64_t use = system_number(path, NULL);
    if (limit < 0 || use < 0)
        return -1;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    int64_t inactive = system_number(path, stat_key);
    int64_t headroom = limit - use + (inactive > 0 ? inactive : 0);
    return headroom < 0 ? 0 : headroom > limit ? limit : headroom;
}

/* Every group from the process' own up to the root may hold the limit that counts. */
static int64_t cgroup_walk(const char *root, char *group, const char *limit_name, const char *use_name, const char *stat_key)
{
    int64_t least = -1;
    for (;;) {
        char folder[1100];
        snprintf(folder, sizeof folder, "%s%s", root, group);
        least = smaller(least, cgroup_headroom(folder, limit_name, use_name, stat_key));
        char *slash = strrchr(group, '/');
        if (slash == NULL)
            return least;
        *slash = '\0';
    }
}

static int64_t cgroup_available(void)
{
    FILE *file = fopen("/proc/self/cgroup", "r"); /* lines "hierarchy:controllers:/path"; version 2 is "0::/path" */
    if (file == NULL)
        return -1;
    int64_t least = -1;
    char line[1024];
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (group == NULL)
            continue;
        *group++ = '\0';
        if (strcmp(controllers + 1, "") == 0)
            least = smaller(least, cgroup_walk("/sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file "));
        else if (strstr(controllers + 1, "memory") != NULL)
            least = smaller(least, cgroup_walk("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                               "total_inactive_file "));
    }
    fclose(file);
    return least;
}

/* What the process' own limits leave (ulimit -v and -d), in bytes. Address space counts, touched or not: both limits refuse a
 * block when it is reserved. */
static int64_t limits_available(void)
{
    /* Pages: all, resident, shared, text, 0, data and stack. */
    long long all = 0, data = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file != NULL) {
        if (fscanf(file, "%lld %*d %*d %*d %*d %lld", &all, &data) != 2)
            all = data = 0;
        fclose(file);
    }
    const struct {
        int resource;
        long long n_pages;
    } limits[] = {{RLIMIT_AS, all}, {RLIMIT_DATA, data}};
    int64_t least = -1;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit limit;
        if (getrlimit(limits[i].resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > INT64_MAX)
            continue;
        int64_t left = (int64_t)limit.rlim_cur - (int64_t)limits[i].n_pages * (int64_t)sysconf(_SC_PAGESIZE);
        least = smaller(least, left < 0 ? 0 : left);
    }
    return least;
}

int64_t memory_available(void)
{
    int64_t kilobytes = system_number("/proc/meminfo", "MemAvailable:");
    int64_t available = smaller(kilobytes < 0 ? -1 : kilobytes * 1024, smaller(cgroup_available(), limits_available()));
#ifdef _SC_PHYS_PAGES
    if (available < 0) /* no /proc: what the machine has */
        available = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE);
#endif
    return available < 0 ? 0 : available;
}
