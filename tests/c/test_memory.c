/* Blocks: zero, aligned, counted, given back; and plans that notice overflow. */
#include "check.h"
#include "utils/memory.h"

#include <sys/resource.h>
#include <unistd.h>

static colibri_message message;

static void test_a_block_is_zero_page_aligned_and_lives_until_its_last_reference(void)
{
    block *b;
    CHECK_OK(block_create(100001, &b, &message), message);
    CHECK(block_bytes(b) == 100001 && (uintptr_t)block_data(b) % 4096 == 0);
    for (int64_t i = 0; i < 100001; i++)
        CHECK(block_data(b)[i] == 0);
    block_retain(b);
    CHECK(block_references(b) == 2);
    block_release(b);
    block_data(b)[100000] = 1;
    CHECK(block_references(b) == 1);
    block_release(b);
    block_release(NULL);
}

static void test_E3_odd_sizes_are_mapped_and_unmapped_a_thousand_times(void)
{
    for (int i = 0; i < 1000; i++) { /* 64 GB a piece: were one not given back, address space or the map count would run out */
        block *b;
        CHECK_OK(block_create(((int64_t)64 << 30) + 1, &b, &message), message);
        block_data(b)[(int64_t)64 << 30] = 1;
        block_release(b);
    }
}

static void test_an_empty_block_has_an_address(void)
{
    block *b;
    CHECK_OK(block_create(0, &b, &message), message);
    CHECK(block_bytes(b) == 0 && block_data(b) != NULL);
    block_release(b);
}

static void test_what_cannot_be_reserved_is_refused_in_bytes(void)
{
    block *b;
    CHECK(block_create((int64_t)1 << 60, &b, &message) == COLIBRI_ERROR_MEMORY && b == NULL);
    CHECK_MESSAGE_HAS(message, "1152921504606846976 bytes");
    CHECK(block_create(INT64_MAX, &b, &message) == COLIBRI_ERROR_MEMORY && b == NULL);
    CHECK_MESSAGE_HAS(message, "9223372036854775807 bytes");
    CHECK(block_create(-1, &b, NULL) == COLIBRI_ERROR_MEMORY && b == NULL);
}

static void test_a_plan_rounds_to_64_bytes_and_keeps_an_overflow(void)
{
    plan p = {0};
    CHECK(plan_take(&p, 3, 4) == 0);
    CHECK(plan_take(&p, 16, 4) == 64);
    CHECK(plan_take(&p, 0, 4) == 128);
    CHECK(plan_take(&p, 1, 1) == 128);
    CHECK(p.n_bytes == 192);
    CHECK(plan_take(&p, INT64_MAX / 2, 4) < 0 && p.n_bytes < 0);
    CHECK(plan_take(&p, 1, 1) < 0 && p.n_bytes < 0);
    plan q = {INT64_MAX - 100};
    CHECK(plan_take(&q, 1, 64) < 0);
    plan r = {0};
    CHECK(plan_take(&r, -1, 4) < 0);
}

static void test_some_memory_is_available(void)
{
    CHECK(memory_available() > (int64_t)1 << 20);
    CHECK(memory_available() < (int64_t)1 << 50);
}

static int64_t pages_in_use(int field)
{
    long long pages[6] = {0};
    FILE *file = fopen("/proc/self/statm", "r");
    if (file != NULL) {
        for (int i = 0; i < 6; i++)
            CHECK(fscanf(file, "%lld", &pages[i]) == 1);
        fclose(file);
    }
    return (int64_t)pages[field];
}

static void test_a_limit_of_the_process_counts_less_what_is_in_use(void)
{
    const int64_t room = (int64_t)64 << 20, slack = (int64_t)1 << 20;
    const int resources[] = {RLIMIT_AS, RLIMIT_DATA};
    const int fields[] = {0, 5}; /* of statm: all, data and stack */
    for (int i = 0; i < 2; i++) {
        struct rlimit before, tight;
        CHECK(getrlimit(resources[i], &before) == 0);
        tight = before;
        tight.rlim_cur = (rlim_t)(pages_in_use(fields[i]) * sysconf(_SC_PAGESIZE) + room);
        CHECK(setrlimit(resources[i], &tight) == 0);
        int64_t available = memory_available();
        block *b = NULL;
        colibri_status within = block_create(room - slack, &b, &message);
        int64_t left = memory_available();
        block_release(b);
        CHECK(setrlimit(resources[i], &before) == 0);
        CHECK(available > room - slack && available < room + slack);
        CHECK_OK(within, message);
        CHECK(left < 2 * slack);
    }
}

int main(void)
{
    RUN(test_a_block_is_zero_page_aligned_and_lives_until_its_last_reference);
    RUN(test_E3_odd_sizes_are_mapped_and_unmapped_a_thousand_times);
    RUN(test_an_empty_block_has_an_address);
    RUN(test_what_cannot_be_reserved_is_refused_in_bytes);
    RUN(test_a_plan_rounds_to_64_bytes_and_keeps_an_overflow);
    RUN(test_some_memory_is_available);
    RUN(test_a_limit_of_the_process_counts_less_what_is_in_use);
    return 0;
}
