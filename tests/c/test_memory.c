/* Blocks: zero, aligned, counted, given back; and plans that notice overflow. */
#define _GNU_SOURCE /* MAP_FIXED_NOREPLACE */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "utils/atomics.h"
#include "utils/memory.h"
#include "utils/system_file.h"

static colibri_message message;

static void test_a_block_is_zero_page_aligned_and_lives_until_its_last_reference(void)
{
    block *b;
    CHECK_OK(block_create(100001, BLOCK_HISTORY, NULL, &b, &message), message);
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
        CHECK_OK(block_create(((int64_t)64 << 30) + 1, BLOCK_HISTORY, NULL, &b, &message), message);
        block_data(b)[(int64_t)64 << 30] = 1;
        block_release(b);
    }
}

static void test_an_untouched_block_of_64_gigabytes_costs_less_than_a_megabyte(void)
{
    int64_t before = system_number("/proc/self/status", "RssAnon:");
    block *b;
    CHECK_OK(block_create((int64_t)64 << 30, BLOCK_HISTORY, NULL, &b, &message), message);
    block_data(b)[(int64_t)32 << 30] = 1;
    CHECK(system_number("/proc/self/status", "RssAnon:") - before < 1024);
    block_release(b);
}

/* Tries to put a page there; a neighbour could as well. */
static bool is_taken(unsigned char *address)
{
    void *page = mmap(address, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (page != MAP_FAILED)
        munmap(page, 4096);
    return page == MAP_FAILED;
}

/* In a child, so that the fault ends the child. */
static bool faults(volatile unsigned char *address)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *address = 1;
        _exit(0);
    }
    int state;
    CHECK(waitpid(child, &state, 0) == child);
    return WIFSIGNALED(state) && WTERMSIG(state) == SIGSEGV;
}

static void test_a_write_beyond_either_end_is_a_fault(void)
{
    static const block_use uses[] = {BLOCK_HISTORY, BLOCK_WORK};
    for (int i = 0; i < 2; i++) {
        block *b;
        CHECK_OK(block_create(3000001, uses[i], NULL, &b, &message), message);
        colibri_block d = block_describe(b);
        CHECK(d.data == block_data(b) && d.n_bytes == 3000001 && d.n_mapped >= d.n_bytes && d.n_mapped % d.page_bytes == 0);
        CHECK(is_taken(block_data(b) - 4096) && is_taken(block_data(b) + d.n_mapped));
        CHECK(faults(block_data(b) - 1) && faults(block_data(b) + d.n_mapped) && !faults(block_data(b) + d.n_mapped - 1));
        block_release(b);
    }
}

static void test_an_owners_blocks_are_listed_until_their_last_reference(void)
{
    int mine, other;
    block *b[3];
    colibri_block list[3];
    for (int i = 0; i < 3; i++)
        CHECK_OK(block_create(1000 + i, BLOCK_WORK, i == 1 ? &other : &mine, &b[i], &message), message);
    CHECK(blocks_of(&mine, list, 3) == 2 && list[0].n_bytes == 1002 && list[1].n_bytes == 1000);
    CHECK(blocks_of(&mine, list, 1) == 2 && blocks_of(&mine, NULL, 0) == 2 && blocks_of(&other, list, 3) == 1);
    block_retain(b[0]);
    block_release(b[0]);
    CHECK(blocks_of(&mine, NULL, 0) == 2);
    block_release(b[0]);
    CHECK(blocks_of(&mine, list, 3) == 1 && list[0].data == block_data(b[2]));
    block_release(b[2]);
    block_release(b[1]);
    CHECK(blocks_of(&mine, NULL, 0) == 0 && blocks_of(&other, NULL, 0) == 0);
}

static void *list_all(void *argument)
{
    int *stop = argument;
    while (atomic_load_acquire(stop) == 0)
        CHECK(blocks_of(stop, NULL, 0) == 0);
    return NULL;
}

static void test_a_child_forked_while_another_thread_lists_blocks_makes_its_own(void)
{
    enum { many = 1000 }; /* so that the list is being read nearly all the time */
    static block *others[many];
    int stop = 0;
    pthread_t thread;
    for (int i = 0; i < many; i++)
        CHECK_OK(block_create(1, BLOCK_HISTORY, NULL, &others[i], &message), message);
    CHECK(pthread_create(&thread, NULL, list_all, &stop) == 0);
    for (int i = 0; i < 50; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20); /* a hang ends the child by a signal */
            block *b;
            CHECK_OK(block_create(1, BLOCK_WORK, NULL, &b, &message), message);
            block_release(b);
            _exit(0);
        }
        int state;
        CHECK(waitpid(child, &state, 0) == child && WIFEXITED(state) && WEXITSTATUS(state) == 0);
    }
    atomic_store_release(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < many; i++)
        block_release(others[i]);
}

static void test_an_empty_block_has_an_address(void)
{
    block *b;
    CHECK_OK(block_create(0, BLOCK_HISTORY, NULL, &b, &message), message);
    CHECK(block_bytes(b) == 0 && block_data(b) != NULL);
    block_release(b);
}

static void test_what_cannot_be_reserved_is_refused_in_bytes(void)
{
    block *b;
    CHECK(block_create((int64_t)1 << 60, BLOCK_HISTORY, NULL, &b, &message) == COLIBRI_ERROR_MEMORY && b == NULL);
    CHECK_MESSAGE_HAS(message, "1152921504606846976 bytes");
    CHECK(block_create(INT64_MAX, BLOCK_HISTORY, NULL, &b, &message) == COLIBRI_ERROR_MEMORY && b == NULL);
    CHECK_MESSAGE_HAS(message, "9223372036854775807 bytes");
    CHECK(block_create(-1, BLOCK_HISTORY, NULL, &b, NULL) == COLIBRI_ERROR_MEMORY && b == NULL);
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
        colibri_status within = block_create(room - slack, BLOCK_HISTORY, NULL, &b, &message);
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
    RUN(test_an_untouched_block_of_64_gigabytes_costs_less_than_a_megabyte);
    RUN(test_a_write_beyond_either_end_is_a_fault);
    RUN(test_an_owners_blocks_are_listed_until_their_last_reference);
    RUN(test_a_child_forked_while_another_thread_lists_blocks_makes_its_own);
    RUN(test_an_empty_block_has_an_address);
    RUN(test_what_cannot_be_reserved_is_refused_in_bytes);
    RUN(test_a_plan_rounds_to_64_bytes_and_keeps_an_overflow);
    RUN(test_some_memory_is_available);
    RUN(test_a_limit_of_the_process_counts_less_what_is_in_use);
    return 0;
}
