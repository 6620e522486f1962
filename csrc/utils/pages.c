#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE and madvise are not in POSIX.1-2008 */
#define _DARWIN_C_SOURCE

#include "pages.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "atomics.h"
#include "system_file.h"

#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it */
#endif

#define THP "/sys/kernel/mm/transparent_hugepage/"

static int64_t failed_unmaps, bytes_left_mapped; /* atomic */

void pages_give_back(void *data, size_t n_bytes)
{
    if (munmap(data, n_bytes) != 0) {
        atomic_add(&failed_unmaps, 1);
        atomic_add(&bytes_left_mapped, (int64_t)n_bytes);
    }
}

void pages_failures(int64_t *n_failed, int64_t *n_bytes)
{
    *n_failed = atomic_load_acquire(&failed_unmaps);
    *n_bytes = atomic_load_acquire(&bytes_left_mapped);
}

void pages_unmap(const pages *p)
{
    pages_give_back(p->reserved, p->n_reserved);
}

static int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* What COLIBRI_HUGE_PAGES asks for: a kind, and whether history is to have it as well. */
static colibri_status wanted_kind(colibri_page_kind *kind, bool *history, colibri_message *message)
{
    static const struct {
        const char *name;
        colibri_page_kind kind;
        bool history;
    } choices[] = {{"madvise", COLIBRI_PAGES_MADVISE, false},
                   {"all", COLIBRI_PAGES_MADVISE, true},
                   {"hugetlb", COLIBRI_PAGES_HUGETLB, false},
                   {"off", COLIBRI_PAGES_PLAIN, false}};
    const char *text = getenv("COLIBRI_HUGE_PAGES");
    if (text == NULL || *text == '\0')
        text = choices[0].name;
    *kind = choices[0].kind;
    *history = choices[0].history;
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++)
        if (strcmp(text, choices[i].name) == 0) {
            *kind = choices[i].kind;
            *history = choices[i].history;
            return COLIBRI_OK;
        }
    return fail(message, COLIBRI_ERROR_ARGUMENT,
                "COLIBRI_HUGE_PAGES is \"%.40s\"; it can be \"madvise\" (the default), \"all\", \"hugetlb\" or \"off\"", text);
}

#ifdef MAP_HUGETLB
/* Without MAP_NORESERVE: the pool must hold every page now. That is no promise yet (a control group may allow fewer), so all are
 * taken here. */
static bool map_hugetlb(int64_t n_bytes, pages *out)
{
    int64_t kilobytes = system_number("/proc/meminfo", "Hugepagesize:");
    if (kilobytes <= 0)
        return false;
    size_t n_mapped = (size_t)round_up(n_bytes, kilobytes * 1024);
    void *data = mmap(NULL, n_mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    if (data == MAP_FAILED)
        return false;
    if (madvise(data, n_mapped, MADV_POPULATE_WRITE) != 0) {
        pages_give_back(data, n_mapped);
        return false;
    }
    *out = (pages){data,     (int64_t)n_mapped, COLIBRI_PAGES_HUGETLB, kilobytes * 1024, "COLIBRI_HUGE_PAGES=hugetlb asks for them",
                   data, n_mapped};
    return true;
}
#endif

/* Address space with a guard on either side of what is to become memory. */
static bool reserve(int64_t n_bytes, int64_t page_bytes, pages *out)
{
    int64_t small = (int64_t)sysconf(_SC_PAGESIZE);
    int64_t n_mapped = round_up(n_bytes > 0 ? n_bytes : 1, page_bytes);
    size_t n_reserved = (size_t)(n_mapped + page_bytes + small);
    void *reserved = mmap(NULL, n_reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return false;
    int64_t address = (int64_t)(uintptr_t)reserved;
    unsigned char *data = (unsigned char *)reserved + (round_up(address + small, page_bytes) - address);
    *out = (pages){data, n_mapped, COLIBRI_PAGES_PLAIN, small, NULL, reserved, n_reserved};
    return true;
}

/* The address space goes back when it did not become memory. */
static bool became(bool memory, const pages *p)
{
    int error = errno;
    if (!memory)
        pages_unmap(p);
    errno = error;
    return memory;
}

static bool map_between_guards(int64_t n_bytes, int64_t page_bytes, pages *out)
{
    return reserve(n_bytes, page_bytes, out) &&
           became(mprotect(out->data, (size_t)out->n_bytes, PROT_READ | PROT_WRITE) == 0, out);
}

static colibri_status too_large(int64_t n_bytes, colibri_message *message)
{
    if (n_bytes < 0 || n_bytes > INT64_MAX / 2 || (uint64_t)n_bytes > SIZE_MAX / 2) /* half: rounding cannot overflow */
        return fail(message, COLIBRI_ERROR_MEMORY, "a block of %lld bytes is more than this machine can address",
                    (long long)n_bytes);
    return COLIBRI_OK;
}

static colibri_status not_mapped(int64_t n_bytes, colibri_message *message)
{
    return fail(message, COLIBRI_ERROR_MEMORY, "%lld bytes cannot be reserved: %s", (long long)n_bytes, strerror(errno));
}

colibri_status pages_map_file(int64_t n_bytes, int file, int64_t offset, pages *out, colibri_message *message)
{
    TRY(too_large(n_bytes, message));
    if (!reserve(n_bytes, (int64_t)sysconf(_SC_PAGESIZE), out) ||
        !became(mmap(out->data, (size_t)out->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, (off_t)offset) !=
                    MAP_FAILED,
                out))
        return not_mapped(n_bytes, message);
    out->kind = COLIBRI_PAGES_FILE;
    out->why = "a file holds them";
    return COLIBRI_OK;
}

colibri_status pages_map(int64_t n_bytes, bool dense, pages *out, colibri_message *message)
{
    colibri_page_kind wanted;
    bool history;
    TRY(wanted_kind(&wanted, &history, message));
    TRY(too_large(n_bytes, message));

    int64_t huge = dense || history ? system_number(THP "hpage_pmd_size", NULL) : -1;
    const char *why = NULL;
    if (!dense && !history)
        why = "history: pages that no row has reached cost nothing";
    else if (wanted == COLIBRI_PAGES_PLAIN)
        why = "COLIBRI_HUGE_PAGES=off asks for them";
    else if (huge > 0 && n_bytes < huge)
        why = "smaller than a huge page";
#ifdef MAP_HUGETLB
    if (why == NULL && wanted == COLIBRI_PAGES_HUGETLB && map_hugetlb(n_bytes, out))
        return COLIBRI_OK;
#endif
#ifdef MADV_HUGEPAGE
    bool advisable = why == NULL && huge > 0 && !system_says(THP "enabled", "[never]");
#else
    bool advisable = false;
#endif
    if (!map_between_guards(n_bytes, advisable ? huge : (int64_t)sysconf(_SC_PAGESIZE), out))
        return not_mapped(n_bytes, message);
#ifdef MADV_HUGEPAGE
    if (advisable && madvise(out->data, (size_t)out->n_bytes, MADV_HUGEPAGE) == 0) {
        out->kind = COLIBRI_PAGES_MADVISE;
        out->page_bytes = huge;
        why = wanted == COLIBRI_PAGES_HUGETLB
                  ? "hugetlb was asked for, but the system's pool has too few free huge pages (vm.nr_hugepages)"
              : history ? "COLIBRI_HUGE_PAGES=all asks for them"
                        : "written from end to end by each pass";
    }
#endif
    out->why = why != NULL ? why : "the system gives no transparent huge pages";
    return COLIBRI_OK;
}
