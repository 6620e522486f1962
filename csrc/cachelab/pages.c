/* pages.c: residency of mapped files, asked of the Linux kernel. Other systems give other answers to calls of the same names, so
 * there nothing is asked. */
#define _DEFAULT_SOURCE /* madvise, mincore */

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif
#include <unistd.h>

#include "../include/colibri_cachelab.h"

static cachelab_status say(cachelab_reason *reason, cachelab_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason->text, sizeof reason->text, format, arguments);
    va_end(arguments);
    return status;
}

int64_t cachelab_page_bytes(void)
{
    return (int64_t)sysconf(_SC_PAGESIZE);
}

#ifdef __linux__

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21 /* Linux 5.4 */
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

/* Whole pages in memory, and where they lie in the file. */
typedef struct span {
    char *data;
    int64_t offset, n_bytes;
} span;

/* The pages that hold any of the bytes. Both roundings keep a range that is empty. */
static cachelab_status outward(const cachelab_range *r, span *out, cachelab_reason *reason)
{
    int64_t page = cachelab_page_bytes(), before = r->offset % page;
    if (r->offset < 0 || r->n_bytes < 0 || ((uintptr_t)r->address - (uintptr_t)r->offset) % (uintptr_t)page != 0)
        return say(reason, CACHELAB_ARGUMENT, "%s: byte %lld of a mapped file cannot lie at %p", r->file, (long long)r->offset,
                   r->address);
    int64_t end = r->offset + r->n_bytes;
    int64_t start = r->offset - before, stop = (end + page - 1) / page * page;
    *out = (span){(char *)(uintptr_t)r->address - before, start, stop - start};
    return CACHELAB_OK;
}

/* The pages that hold nothing else. What lies behind the end of the file is nobody's. */
static span inward(span pages, const cachelab_range *r, int64_t file_bytes)
{
    int64_t page = cachelab_page_bytes(), end = r->offset + r->n_bytes, stop = pages.offset + pages.n_bytes;
    if (end != stop && end != file_bytes)
        stop -= page;
    int64_t skip = pages.offset < r->offset ? page : 0;
    int64_t n_bytes = stop - pages.offset - skip;
    return (span){pages.data + skip, pages.offset + skip, n_bytes > 0 ? n_bytes : 0};
}

enum { PIECE = 4096 }; /* pages asked about at a time */

/* Pages of the span that are resident; into `pages`, when not NULL, 1 or 0 for each. -1: errno says why. */
static int64_t count_resident(span s, uint8_t *pages)
{
    unsigned char piece[PIECE];
    int64_t page = cachelab_page_bytes(), n = s.n_bytes / page, count = 0;
    for (int64_t first = 0; first < n; first += PIECE) {
        int64_t some = n - first < PIECE ? n - first : PIECE;
        if (mincore(s.data + first * page, (size_t)(some * page), piece) != 0)
            return -1;
        for (int64_t i = 0; i < some; i++) {
            count += piece[i] & 1;
            if (pages != NULL)
                pages[first + i] = piece[i] & 1;
        }
    }
    return count;
}

cachelab_status cachelab_resident(const cachelab_range *r, int64_t *n_resident, uint8_t *pages, cachelab_reason *reason)
{
    span all = {0};
    *n_resident = 0;
    cachelab_status status = outward(r, &all, reason);
    if (status != CACHELAB_OK || r->n_bytes == 0)
        return status;
    int64_t page = cachelab_page_bytes(), count = count_resident(all, pages);
    if (count < 0)
        return say(reason, CACHELAB_REFUSED, "%s: its pages cannot be asked about: %s", r->file, strerror(errno));
    /* The bytes of the first and of the last page that lie outside do not count. */
    span first = {all.data, all.offset, page}, last = {all.data + all.n_bytes - page, all.offset + all.n_bytes - page, page};
    int64_t before = r->offset - all.offset, behind = all.offset + all.n_bytes - (r->offset + r->n_bytes);
    *n_resident = count * page - (count_resident(first, NULL) == 1 ? before : 0) - (count_resident(last, NULL) == 1 ? behind : 0);
    return CACHELAB_OK;
}

cachelab_status cachelab_residency_told(const char *file, cachelab_reason *reason)
{
    struct stat info;
    if (stat(file, &info) != 0)
        return say(reason, CACHELAB_REFUSED, "%s: %s", file, strerror(errno));
    if (info.st_uid != geteuid() && faccessat(AT_FDCWD, file, W_OK, AT_EACCESS) != 0)
        return say(reason, CACHELAB_UNAVAILABLE,
                   "%s belongs to another user and may not be written to; of such a file the kernel answers that every page is "
                   "resident", file);
    return CACHELAB_OK;
}

static cachelab_status open_file(const char *file, int *fd, struct stat *info, cachelab_reason *reason)
{
    *fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0)
        return say(reason, CACHELAB_REFUSED, "%s: %s", file, strerror(errno));
    if (fstat(*fd, info) != 0 || !S_ISREG(info->st_mode)) {
        close(*fd);
        return say(reason, CACHELAB_REFUSED, "%s is not a regular file", file);
    }
    return CACHELAB_OK;
}

/* This mapping lets go of the pages, then the page cache is asked to. False: the mapping holds them locked. */
static bool let_go(span s, int fd)
{
    bool locked = madvise(s.data, (size_t)s.n_bytes, MADV_DONTNEED) != 0 && errno == EINVAL;
    posix_fadvise(fd, (off_t)s.offset, (off_t)s.n_bytes, POSIX_FADV_DONTNEED);
    return !locked;
}

/* The page cache may keep many pages as one piece, and a piece that reaches beyond the span stays whole. Reclaim splits it, when
 * its pages are mapped here: so each run of pages that stayed is mapped once more, paged out, and let go. */
static void split_and_let_go(span s, int fd)
{
    uint8_t pages[PIECE];
    int64_t page = cachelab_page_bytes(), n = s.n_bytes / page;
    for (int64_t start = 0; start < n; start += PIECE) {
        int64_t some = n - start < PIECE ? n - start : PIECE;
        span piece = {s.data + start * page, s.offset + start * page, some * page};
        if (count_resident(piece, pages) < 1)
            continue;
        for (int64_t i = 0, stop; i < some; i = stop) {
            for (stop = i + 1; stop < some && pages[stop] == pages[i]; stop++) {
            }
            if (!pages[i])
                continue;
            span run = {piece.data + i * page, piece.offset + i * page, (stop - i) * page};
            if (madvise(run.data, (size_t)run.n_bytes, MADV_POPULATE_READ) == 0)
                madvise(run.data, (size_t)run.n_bytes, MADV_PAGEOUT);
            let_go(run, fd);
        }
    }
}

enum { TMPFS = 0x01021994, RAMFS = (int)0x858458f6 }; /* linux/magic.h, which is not everywhere */

static const char *why_they_stay(int fd)
{
    struct statfs system;
    if (fstatfs(fd, &system) == 0 && ((int)system.f_type == TMPFS || (int)system.f_type == RAMFS))
        return "the file system (tmpfs) keeps its files in memory alone";
    return "pages stay that another mapping of the file uses, in this process or another, that are not yet written to disk, or "
           "that belong to a file whose name another one has now";
}

cachelab_status cachelab_drop(const cachelab_range *r, int64_t *n_left, cachelab_reason *reason)
{
    span all = {0};
    struct stat info;
    int fd;
    *n_left = 0;
    cachelab_status status = outward(r, &all, reason);
    if (status != CACHELAB_OK || r->n_bytes == 0 || (status = open_file(r->file, &fd, &info, reason)) != CACHELAB_OK)
        return status;
    span own = inward(all, r, (int64_t)info.st_size);
    if (own.n_bytes > 0) {
        bool locked = !let_go(own, fd);
        if (!locked && count_resident(own, NULL) > 0)
            split_and_let_go(own, fd);
        int64_t count = count_resident(own, NULL);
        if (count < 0)
            status = say(reason, CACHELAB_REFUSED, "%s: its pages cannot be asked about: %s", r->file, strerror(errno));
        else if (count > 0)
            status = say(reason, CACHELAB_REFUSED, "%s", locked ? "pages that are locked stay" : why_they_stay(fd));
        *n_left = count > 0 ? count * cachelab_page_bytes() : 0;
    }
    close(fd);
    return status;
}

/* Where pages cannot be mapped at once, reading one byte of each fetches it; unlike a touch, a read of a file that has become
 * shorter is no fault. */
static cachelab_status read_pages(span s, int fd, const char *file, cachelab_reason *reason)
{
    char byte;
    for (int64_t at = 0; at < s.n_bytes; at += cachelab_page_bytes())
        if (pread(fd, &byte, 1, (off_t)(s.offset + at)) < 0)
            return say(reason, CACHELAB_REFUSED, "%s cannot be read: %s", file, strerror(errno));
    return CACHELAB_OK;
}

cachelab_status cachelab_warm(const cachelab_range *r, cachelab_reason *reason)
{
    span all = {0};
    struct stat info;
    int fd;
    cachelab_status status = outward(r, &all, reason);
    if (status != CACHELAB_OK || r->n_bytes == 0 || (status = open_file(r->file, &fd, &info, reason)) != CACHELAB_OK)
        return status;
    posix_fadvise(fd, (off_t)all.offset, (off_t)all.n_bytes, POSIX_FADV_WILLNEED); /* reads ahead while the next call waits */
    if (madvise(all.data, (size_t)all.n_bytes, MADV_POPULATE_READ) != 0) {
        if (errno == EINVAL || errno == ENOSYS)
            status = read_pages(all, fd, r->file, reason);
        else
            status = say(reason, CACHELAB_REFUSED, "%s cannot be read: %s", r->file,
                         errno == EFAULT ? "it has become shorter" : strerror(errno));
    }
    close(fd);
    return status;
}

cachelab_status cachelab_lock(const cachelab_range *r, cachelab_reason *reason)
{
    span all = {0};
    cachelab_status status = outward(r, &all, reason);
    if (status != CACHELAB_OK || r->n_bytes == 0 || mlock(all.data, (size_t)all.n_bytes) == 0)
        return status;
    int error = errno;
    struct rlimit limit;
    if ((error == ENOMEM || error == EPERM || error == EAGAIN) && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
        limit.rlim_cur != RLIM_INFINITY)
        return say(reason, CACHELAB_REFUSED,
                   "%lld bytes cannot be locked: this process may lock %lld bytes in all (RLIMIT_MEMLOCK, `ulimit -l`), those "
                   "locked already included", (long long)all.n_bytes, (long long)limit.rlim_cur);
    return say(reason, CACHELAB_REFUSED, "%lld bytes cannot be locked: %s", (long long)all.n_bytes, strerror(error));
}

cachelab_status cachelab_unlock(const cachelab_range *r, cachelab_reason *reason)
{
    span all = {0};
    cachelab_status status = outward(r, &all, reason);
    if (status != CACHELAB_OK || r->n_bytes == 0 || munlock(all.data, (size_t)all.n_bytes) == 0)
        return status;
    return say(reason, CACHELAB_REFUSED, "%s cannot be unlocked: %s", r->file, strerror(errno));
}

#else

static cachelab_status not_here(const char *what, cachelab_reason *reason)
{
    return say(reason, CACHELAB_UNAVAILABLE, "%s: not available here; it is asked of the Linux kernel", what);
}

cachelab_status cachelab_resident(const cachelab_range *r, int64_t *n_resident, uint8_t *pages, cachelab_reason *reason)
{
    (void)r, (void)pages;
    *n_resident = 0;
    return not_here("which pages are in memory", reason);
}

cachelab_status cachelab_residency_told(const char *file, cachelab_reason *reason)
{
    (void)file;
    return not_here("which pages are in memory", reason);
}

cachelab_status cachelab_drop(const cachelab_range *r, int64_t *n_left, cachelab_reason *reason)
{
    (void)r;
    *n_left = 0;
    return not_here("dropping pages", reason);
}

cachelab_status cachelab_warm(const cachelab_range *r, cachelab_reason *reason)
{
    (void)r;
    return not_here("reading pages ahead", reason);
}

cachelab_status cachelab_lock(const cachelab_range *r, cachelab_reason *reason)
{
    (void)r;
    return not_here("locking pages", reason);
}

cachelab_status cachelab_unlock(const cachelab_range *r, cachelab_reason *reason)
{
    (void)r;
    return not_here("unlocking pages", reason);
}

#endif

cachelab_status cachelab_faults(int64_t *n_minor, int64_t *n_major, cachelab_reason *reason)
{
    struct rusage usage;
    *n_minor = *n_major = 0;
    if (getrusage(RUSAGE_SELF, &usage) != 0)
        return say(reason, CACHELAB_UNAVAILABLE, "page faults: not available here: %s", strerror(errno));
    *n_minor = (int64_t)usage.ru_minflt;
    *n_major = (int64_t)usage.ru_majflt;
    return CACHELAB_OK;
}
