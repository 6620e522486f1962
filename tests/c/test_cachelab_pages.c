/* test_cachelab_pages.c: residency of the pages of a mapped file, on whatever file system the test runs: where pages cannot be
 * dropped, the reason is what is checked. */
#define _DEFAULT_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
#include "colibri_cachelab.h"

#ifdef __linux__

enum { N_PAGES = 300 };

static char path[] = "cachelab_pages_XXXXXX";
static int64_t page, n_bytes;
static char *data;
static cachelab_reason reason;

/* 300 pages and 100 bytes, on disk, mapped, and all in memory. */
static void set_up(void)
{
    int fd = mkstemp(path);
    page = cachelab_page_bytes();
    n_bytes = N_PAGES * page + 100;
    CHECK(fd >= 0);
    for (int64_t at = 0; at < n_bytes; at += 100) {
        char some[100];
        memset(some, (int)(at % 251), sizeof some);
        int64_t size = n_bytes - at < 100 ? n_bytes - at : 100;
        CHECK(write(fd, some, (size_t)size) == (ssize_t)size);
    }
    CHECK(fsync(fd) == 0);
    data = mmap(NULL, (size_t)n_bytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(data != MAP_FAILED);
    close(fd);
}

static cachelab_range range(int64_t offset, int64_t size)
{
    return (cachelab_range){path, offset, data + offset, size};
}

static int64_t resident(int64_t offset, int64_t size)
{
    cachelab_range r = range(offset, size);
    int64_t count;
    CHECK_OK(cachelab_resident(&r, &count, NULL, &reason), reason);
    return count;
}

static void warm(int64_t offset, int64_t size)
{
    cachelab_range r = range(offset, size);
    CHECK_OK(cachelab_warm(&r, &reason), reason);
}

/* False where the file system keeps the pages, which it then says. */
static bool drop(int64_t offset, int64_t size)
{
    cachelab_range r = range(offset, size);
    int64_t left;
    if (cachelab_drop(&r, &left, &reason) == CACHELAB_OK)
        return true;
    CHECK(left > 0);
    CHECK_MESSAGE_HAS(reason, "tmpfs");
    CHECK(resident(offset, size) > 0);
    return false;
}

static void test_a_drop_takes_the_whole_pages_of_a_span_and_no_page_beside_them(void)
{
    warm(0, n_bytes);
    CHECK(resident(0, n_bytes) == n_bytes);
    if (!drop(10 * page - 1, 20 * page + 2)) /* a byte of page 9, pages 10 to 29, a byte of page 30 */
        return;
    uint8_t pages[N_PAGES + 1];
    cachelab_range all = range(0, n_bytes);
    int64_t count;
    CHECK_OK(cachelab_resident(&all, &count, pages, &reason), reason);
    for (int i = 0; i <= N_PAGES; i++)
        CHECK(pages[i] == (i < 10 || i >= 30));
    CHECK(count == n_bytes - 20 * page);
    CHECK(resident(10 * page - 1, 20 * page + 2) == 2);
    CHECK(resident(9 * page + 7, page) == page - 7);
    CHECK(data[15 * page] == (char)(15 * page / 100 * 100 % 251)); /* and comes again when it is used */
}

static void test_the_last_page_of_a_file_goes_although_the_file_does_not_fill_it(void)
{
    warm(0, n_bytes);
    if (drop(N_PAGES * page, 100))
        CHECK(resident(N_PAGES * page, 100) == 0 && resident(0, N_PAGES * page) == N_PAGES * page);
}

static void test_a_span_within_a_page_is_nothing_to_drop(void)
{
    warm(0, n_bytes);
    CHECK(drop(5 * page + 1, page - 2) && drop(5 * page, page - 1) && drop(5 * page, 0));
    CHECK(resident(0, n_bytes) == n_bytes);
}

static void test_warming_reads_every_page_that_holds_a_byte_of_the_span(void)
{
    if (!drop(0, n_bytes))
        return;
    CHECK(resident(0, n_bytes) == 0);
    warm(3 * page - 1, page + 2);
    CHECK(resident(2 * page, 3 * page) == 3 * page);
}

#ifdef __has_feature
#define SANITIZED __has_feature(address_sanitizer)
#elif defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif
#define LOCKS !SANITIZED /* the sanitizer's mlock locks nothing */

#if LOCKS
static void test_locked_pages_stay_and_say_so_until_they_are_unlocked(void)
{
    cachelab_range r = range(50 * page, 8 * page);
    int64_t left;
    CHECK_OK(cachelab_lock(&r, &reason), reason);
    CHECK(cachelab_drop(&r, &left, &reason) == CACHELAB_REFUSED && left == 8 * page);
    CHECK_MESSAGE_HAS(reason, "locked");
    CHECK_OK(cachelab_unlock(&r, &reason), reason);
    if (drop(50 * page, 8 * page))
        CHECK(resident(50 * page, 8 * page) == 0);
}

static void test_more_than_the_limit_is_not_locked_and_the_limit_is_named(void)
{
    struct rlimit before, limit;
    bool root = geteuid() == 0;
    CHECK(getrlimit(RLIMIT_MEMLOCK, &before) == 0);
    limit = before;
    limit.rlim_cur = (rlim_t)(16 * page);
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    CHECK(!root || seteuid(65534) == 0); /* the limit is not root's */
    cachelab_range r = range(0, 17 * page);
    char wanted[64];
    snprintf(wanted, sizeof wanted, "may lock %lld bytes", (long long)(16 * page));
    CHECK(cachelab_lock(&r, &reason) == CACHELAB_REFUSED);
    CHECK_MESSAGE_HAS(reason, wanted);
    CHECK(!root || seteuid(0) == 0);
    CHECK(setrlimit(RLIMIT_MEMLOCK, &before) == 0);
}

#endif

static void test_addresses_and_files_that_do_not_fit_are_refused_with_a_sentence(void)
{
    cachelab_range wrong = {path, 5 * page, data + 5 * page + 1, page}, gone = range(0, page), negative = range(0, -1);
    int64_t count;
    CHECK(cachelab_resident(&wrong, &count, NULL, &reason) == CACHELAB_ARGUMENT && count == 0);
    CHECK_MESSAGE_HAS(reason, path);
    CHECK(cachelab_drop(&wrong, &count, &reason) == CACHELAB_ARGUMENT && cachelab_warm(&negative, &reason) == CACHELAB_ARGUMENT);
    gone.file = "not_there";
    CHECK(cachelab_warm(&gone, &reason) == CACHELAB_REFUSED && cachelab_residency_told("not_there", &reason) == CACHELAB_REFUSED);
    CHECK_MESSAGE_HAS(reason, "not_there: No such file");
    gone.file = ".";
    CHECK(cachelab_drop(&gone, &count, &reason) == CACHELAB_REFUSED);
    CHECK_MESSAGE_HAS(reason, "not a regular file");
}

static void test_a_file_that_became_shorter_is_an_error_and_no_signal(void)
{
    CHECK(truncate(path, page) == 0);
    cachelab_range r = range(10 * page, page);
    CHECK(cachelab_warm(&r, &reason) == CACHELAB_REFUSED || resident(10 * page, page) == 0);
    CHECK(resident(10 * page, page) == 0);
}

static void test_page_faults_are_counted(void)
{
    int64_t minor[2], major[2];
    CHECK_OK(cachelab_faults(&minor[0], &major[0], &reason), reason);
    volatile char *fresh = mmap(NULL, (size_t)(64 * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < 64; i++)
        fresh[i * page] = 1;
    CHECK_OK(cachelab_faults(&minor[1], &major[1], &reason), reason);
    CHECK(minor[1] > minor[0] && major[1] >= major[0] && major[0] >= 0);
    munmap((void *)(uintptr_t)fresh, (size_t)(64 * page));
}

int main(void)
{
    set_up();
    RUN(test_a_drop_takes_the_whole_pages_of_a_span_and_no_page_beside_them);
    RUN(test_the_last_page_of_a_file_goes_although_the_file_does_not_fill_it);
    RUN(test_a_span_within_a_page_is_nothing_to_drop);
    RUN(test_warming_reads_every_page_that_holds_a_byte_of_the_span);
#if LOCKS
    RUN(test_locked_pages_stay_and_say_so_until_they_are_unlocked);
    RUN(test_more_than_the_limit_is_not_locked_and_the_limit_is_named);
#endif
    RUN(test_addresses_and_files_that_do_not_fit_are_refused_with_a_sentence);
    RUN(test_a_file_that_became_shorter_is_an_error_and_no_signal);
    RUN(test_page_faults_are_counted);
    munmap(data, (size_t)n_bytes);
    unlink(path);
    return 0;
}

#else

int main(void)
{
    cachelab_range range = {"file", 0, "", 1};
    cachelab_reason reason;
    int64_t count;
    CHECK(cachelab_resident(&range, &count, NULL, &reason) == CACHELAB_UNAVAILABLE && count == 0);
    CHECK_MESSAGE_HAS(reason, "not available here");
    return 0;
}

#endif
