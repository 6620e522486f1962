/* Nothing is allocated while a forward pass runs. The linker sends every allocation of the engine through the counters below
 * (CMakeLists.txt wraps these names for this program alone). */
#include <sys/mman.h>

#include "check.h"
#include "support/tiny_model.h"
#include "utils/atomics.h"

static int64_t n_allocations; /* atomic */

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_mmap(void *address, size_t length, int protection, int flags, int file, off_t offset);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_mmap(void *address, size_t length, int protection, int flags, int file, off_t offset);

void *__wrap_malloc(size_t n)
{
    atomic_add(&n_allocations, 1);
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    atomic_add(&n_allocations, 1);
    return __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    atomic_add(&n_allocations, 1);
    return __real_realloc(p, n);
}

void *__wrap_mmap(void *address, size_t length, int protection, int flags, int file, off_t offset)
{
    atomic_add(&n_allocations, 1);
    return __real_mmap(address, length, protection, flags, file, offset);
}

static void test_a_forward_pass_allocates_nothing(void)
{
    enum { n = 40 };
    tiny_checkpoint tiny[] = {tiny_mixtral(), tiny_qwen2_moe(), tiny_qwen3_moe(), tiny_olmoe()};
    const char *const captures[] = {"none", "all"};
    const colibri_watch watches[] = {COLIBRI_WATCH_OFF, COLIBRI_WATCH_COUNT, COLIBRI_WATCH_STOP};
    int32_t ids[n];
    for (size_t i = 0; i < sizeof tiny / sizeof *tiny; i++) {
        colibri_model *m = tiny_open(&tiny[i]);
        tiny_ids(ids, n, &tiny[i], 1);
        for (int j = 0; j < 3; j++) {
            int64_t before = atomic_load_acquire(&n_allocations);
            colibri_session *s = tiny_session(m, &(tiny_options){{captures[j % 2]}, .threads = 2, .max_tokens = n, .watch = watches[j]});
            CHECK(atomic_load_acquire(&n_allocations) > before); /* the counters count */
            before = atomic_load_acquire(&n_allocations);
            tiny_feed(s, ids, n - 8);
            for (int t = n - 8; t < n; t++)
                tiny_feed(s, ids + t, 1);
            CHECK(atomic_load_acquire(&n_allocations) == before);
            colibri_session_release(s);
        }
        tiny_close(m, &tiny[i]);
    }
}

int main(void)
{
    RUN(test_a_forward_pass_allocates_nothing);
    return 0;
}
