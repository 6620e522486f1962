/* Which pages a block gets when the system has a pool of huge pages, has none, or has transparent ones only; and that every byte
 * goes back. The linker sends the system calls of the engine through a small system of our own (CMakeLists.txt wraps these names
 * for this program alone), so that each kind of machine can be played on any machine. */
#define _GNU_SOURCE
#include "utils/pages.h"

#include <errno.h>
#include <sys/mman.h>

#include "check.h"
#include "utils/memory.h"
#include "utils/system_file.h"

static colibri_message message;

static struct {
    int64_t pool_free;    /* bytes that MAP_HUGETLB may still take */
    bool populate_fails;  /* the pool promised pages that a control group does not allow */
    bool munmap_fails;
    bool advice_refused;
    int64_t n_mapped;     /* bytes mapped and not given back */
    int n_maps, n_unmaps;
} played;

void *__real_mmap(void *address, size_t length, int protection, int flags, int file, off_t offset);
int __real_munmap(void *address, size_t length);
int __real_madvise(void *address, size_t length, int advice);
void *__wrap_mmap(void *address, size_t length, int protection, int flags, int file, off_t offset);
int __wrap_munmap(void *address, size_t length);
int __wrap_madvise(void *address, size_t length, int advice);

static size_t pool_length; /* of the one mapping that a test takes from the pool */

void *__wrap_mmap(void *address, size_t length, int protection, int flags, int file, off_t offset)
{
    if ((flags & MAP_HUGETLB) != 0) {
        if (length % ((size_t)2 << 20) != 0 || (flags & MAP_NORESERVE) != 0) {
            errno = EINVAL;
            return MAP_FAILED;
        }
        if ((int64_t)length > played.pool_free) {
            errno = ENOMEM;
            return MAP_FAILED;
        }
        played.pool_free -= (int64_t)length;
        pool_length = length;
        flags &= ~MAP_HUGETLB;
    }
    void *data = __real_mmap(address, length, protection, flags, file, offset);
    if (data != MAP_FAILED) {
        played.n_mapped += (int64_t)length;
        played.n_maps++;
    }
    return data;
}

int __wrap_munmap(void *address, size_t length)
{
    if (played.munmap_fails || (pool_length != 0 && length != pool_length)) { /* a length that is not the mapping's own */
        errno = EINVAL;
        return -1;
    }
    if (pool_length != 0) {
        played.pool_free += (int64_t)pool_length;
        pool_length = 0;
    }
    played.n_mapped -= (int64_t)length;
    played.n_unmaps++;
    return __real_munmap(address, length);
}

int __wrap_madvise(void *address, size_t length, int advice)
{
    if (advice == MADV_HUGEPAGE)
        return played.advice_refused ? (errno = EINVAL, -1) : __real_madvise(address, length, advice);
    if (pool_length != 0 && played.populate_fails)
        return errno = EFAULT, -1;
    return 0; /* populate */
}

static int64_t failures(void)
{
    int64_t n_failed, n_bytes;
    pages_failures(&n_failed, &n_bytes);
    return n_failed;
}

static const int64_t odd = 3 * 1000 * 1000 + 1; /* no multiple of any page, larger than a huge one */

static bool has_transparent(void)
{
    return system_number("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", NULL) == 2 << 20 &&
           !system_says("/sys/kernel/mm/transparent_hugepage/enabled", "[never]");
}

static colibri_block made(block_use use, int64_t n_bytes)
{
    block *b;
    CHECK_OK(block_create(n_bytes, use, NULL, &b, &message), message);
    for (int64_t i = 0; i < n_bytes; i += 4096)
        CHECK(block_data(b)[i] == 0);
    block_data(b)[n_bytes - 1] = 1;
    colibri_block described = block_describe(b);
    block_release(b);
    return described;
}

static void begin(const char *wanted)
{
    memset(&played, 0, sizeof played);
    CHECK(wanted == NULL ? unsetenv("COLIBRI_HUGE_PAGES") == 0 : setenv("COLIBRI_HUGE_PAGES", wanted, 1) == 0);
}

static void test_E3_pages_of_the_pool_are_rounded_and_given_back_a_hundred_times(void)
{
    begin("hugetlb");
    played.pool_free = 4 << 20;
    for (int i = 0; i < 100; i++) {
        colibri_block b = made(BLOCK_WORK, odd);
        CHECK(b.pages == COLIBRI_PAGES_HUGETLB && b.page_bytes == 2 << 20 && b.n_mapped == 4 << 20 && b.n_bytes == odd);
        CHECK(played.n_mapped == 0 && played.pool_free == 4 << 20);
    }
    CHECK(failures() == 0);
}

static void test_E3_an_empty_pool_is_told_and_the_next_kind_serves(void)
{
    begin("hugetlb");
    colibri_block b = made(BLOCK_WORK, odd);
    if (has_transparent()) {
        CHECK(b.pages == COLIBRI_PAGES_MADVISE && strstr(b.why, "too few free huge pages") != NULL);
    } else {
        CHECK(b.pages == COLIBRI_PAGES_PLAIN);
    }
    CHECK(played.n_mapped == 0 && failures() == 0);
}

static void test_E3_a_pool_that_promises_more_than_it_gives_is_left_at_once(void)
{
    begin("hugetlb");
    played.pool_free = 64 << 20;
    played.populate_fails = true;
    colibri_block b = made(BLOCK_WORK, odd);
    CHECK(b.pages != COLIBRI_PAGES_HUGETLB);
    CHECK(played.pool_free == 64 << 20 && played.n_mapped == 0 && played.n_maps == played.n_unmaps && failures() == 0);
}

static void test_the_pool_is_left_alone_unless_asked_for(void)
{
    begin(NULL);
    played.pool_free = 64 << 20;
    CHECK(made(BLOCK_WORK, odd).pages != COLIBRI_PAGES_HUGETLB);
}

static void test_working_memory_is_aligned_to_the_huge_pages_it_asks_for(void)
{
    begin("madvise");
    colibri_block b = made(BLOCK_WORK, odd);
    if (has_transparent()) {
        CHECK(b.pages == COLIBRI_PAGES_MADVISE && (uintptr_t)b.data % (2 << 20) == 0 && b.n_mapped == 4 << 20);
    } else {
        CHECK(b.pages == COLIBRI_PAGES_PLAIN && strstr(b.why, "no transparent huge pages") != NULL);
    }
}

static void test_a_system_that_refuses_the_advice_leaves_plain_pages(void)
{
    begin("madvise");
    played.advice_refused = true;
    colibri_block b = made(BLOCK_WORK, odd);
    CHECK(b.pages == COLIBRI_PAGES_PLAIN && b.page_bytes == (int64_t)4096 && strstr(b.why, "no transparent huge pages") != NULL);
}

static void test_history_and_small_blocks_are_plain_whatever_is_asked(void)
{
    static const char *const wanted[] = {"hugetlb", "madvise", "off"};
    for (int i = 0; i < 3; i++) {
        begin(wanted[i]);
        played.pool_free = 64 << 20;
        CHECK(made(BLOCK_HISTORY, odd).pages == COLIBRI_PAGES_PLAIN);
        CHECK(made(BLOCK_WORK, 100001).pages == COLIBRI_PAGES_PLAIN);
        CHECK(made(BLOCK_WORK, 100001).n_mapped == 102400);
        CHECK(played.n_mapped == 0);
    }
    CHECK(made(BLOCK_WORK, odd).pages == COLIBRI_PAGES_PLAIN); /* off */
}

static void test_history_has_transparent_huge_pages_when_all_are_to(void)
{
    begin("all");
    colibri_page_kind kind = has_transparent() ? COLIBRI_PAGES_MADVISE : COLIBRI_PAGES_PLAIN;
    CHECK(made(BLOCK_HISTORY, odd).pages == kind && made(BLOCK_WORK, odd).pages == kind);
    CHECK(made(BLOCK_HISTORY, 100001).pages == COLIBRI_PAGES_PLAIN && played.n_mapped == 0);
}

static void test_an_unknown_kind_is_refused_with_the_known_ones(void)
{
    block *b;
    begin("giant");
    CHECK(block_create(odd, BLOCK_WORK, NULL, &b, &message) == COLIBRI_ERROR_ARGUMENT && b == NULL);
    CHECK_MESSAGE_HAS(message, "\"giant\"; it can be \"madvise\" (the default), \"all\", \"hugetlb\" or \"off\"");
}

static void test_an_unmap_that_fails_is_counted_with_its_bytes(void)
{
    int64_t n_failed, n_bytes;
    begin("off");
    played.munmap_fails = true;
    made(BLOCK_WORK, odd);
    pages_failures(&n_failed, &n_bytes);
    CHECK(n_failed == 1 && n_bytes == played.n_mapped && n_bytes >= odd);
}

int main(void)
{
    RUN(test_E3_pages_of_the_pool_are_rounded_and_given_back_a_hundred_times);
    RUN(test_E3_an_empty_pool_is_told_and_the_next_kind_serves);
    RUN(test_E3_a_pool_that_promises_more_than_it_gives_is_left_at_once);
    RUN(test_the_pool_is_left_alone_unless_asked_for);
    RUN(test_working_memory_is_aligned_to_the_huge_pages_it_asks_for);
    RUN(test_a_system_that_refuses_the_advice_leaves_plain_pages);
    RUN(test_history_and_small_blocks_are_plain_whatever_is_asked);
    RUN(test_history_has_transparent_huge_pages_when_all_are_to);
    RUN(test_an_unknown_kind_is_refused_with_the_known_ones);
    RUN(test_an_unmap_that_fails_is_counted_with_its_bytes);
    return 0;
}
