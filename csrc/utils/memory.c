#define _DEFAULT_SOURCE /* MAP_ANONYMOUS and MAP_NORESERVE are not in POSIX.1-2008 */
#define _DARWIN_C_SOURCE

#include "memory.h"

#include "atomics.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

struct block {
    unsigned char *data;
    int64_t n_bytes;  /* as asked for */
    size_t n_mapped;  /* rounded up to whole pages: what munmap wants */
    int64_t references;
};

colibri_status block_create(int64_t n_bytes, block **out, colibri_message *message)
{
    *out = NULL;
    int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
    if (n_bytes < 0 || n_bytes > INT64_MAX - page || (uint64_t)n_bytes > SIZE_MAX - (uint64_t)page)
        return fail(message, COLIBRI_ERROR_MEMORY, "a block of %lld bytes is more than this machine can address",
                    (long long)n_bytes);
    size_t n_mapped = n_bytes == 0 ? (size_t)page : (size_t)((n_bytes + page - 1) / page * page);
    block *b = malloc(sizeof *b);
    if (b == NULL)
        return fail(message, COLIBRI_ERROR_MEMORY, "no memory for a block's record");
    void *data = mmap(NULL, n_mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        int error = errno;
        free(b);
        return fail(message, COLIBRI_ERROR_MEMORY, "%lld bytes cannot be reserved: %s", (long long)n_bytes, strerror(error));
    }
    *b = (block){data, n_bytes, n_mapped, 1};
    *out = b;
    return COLIBRI_OK;
}

void block_retain(block *b)
{
    atomic_add(&b->references, 1);
}

void block_release(block *b)
{
    if (b == NULL || atomic_add(&b->references, -1) != 0)
        return;
    munmap(b->data, b->n_mapped);
    free(b);
}

int64_t block_references(const block *b)
{
    return atomic_load_acquire(&b->references);
}

unsigned char *block_data(block *b)
{
    return b->data;
}

int64_t block_bytes(const block *b)
{
    return b->n_bytes;
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

/* The number after `key` (at the start of a line; NULL: the file holds one number) or -1. "max" and absent files give -1. */
static int64_t read_number(const char *path, const char *key)
{
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return -1;
    char line[256];
    int64_t number = -1;
    size_t length = key == NULL ? 0 : strlen(key);
    while (number < 0 && fgets(line, sizeof line, file) != NULL) {
        long long value;
        if ((key == NULL || strncmp(line, key, length) == 0) && sscanf(line + length, "%lld", &value) == 1)
            number = (int64_t)value;
        if (key == NULL)
            break;
    }
    fclose(file);
    return number;
}

static int64_t smaller(int64_t a, int64_t b) /* -1: unknown */
{
    return a < 0 ? b : b < 0 ? a : a < b ? a : b;
}

/* Limit minus use of one control group. Pages of inactive files count as used but are given back when memory is short. */
static int64_t cgroup_headroom(const char *folder, const char *limit_name, const char *use_name, const char *stat_key)
{
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", folder, limit_name);
    int64_t limit = read_number(path, NULL);
    snprintf(path, sizeof path, "%s/%s", folder, use_name);
    int64_t use = read_number(path, NULL);
    if (limit < 0 || use < 0)
        return -1;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    int64_t inactive = read_number(path, stat_key);
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
    int64_t kilobytes = read_number("/proc/meminfo", "MemAvailable:");
    int64_t available = smaller(kilobytes < 0 ? -1 : kilobytes * 1024, smaller(cgroup_available(), limits_available()));
#ifdef _SC_PHYS_PAGES
    if (available < 0) /* no /proc: what the machine has */
        available = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE);
#endif
    return available < 0 ? 0 : available;
}
