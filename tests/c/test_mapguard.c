/* test_mapguard.c: a shrunken mapping costs a flag inside the guard, and the process outside it. */
#define _DEFAULT_SOURCE
#undef NDEBUG
#include "../../csrc/utils/mapguard.h"

#include <assert.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static size_t page;

/* Two pages of ones whose second page is no longer in the file. */
static volatile unsigned char *shrunken(void)
{
    char path[] = "/tmp/colibri_mapguard_XXXXXX";
    int fd = mkstemp(path);
    unsigned char *ones = malloc(2 * page);
    assert(fd >= 0 && ones != NULL);
    memset(ones, 1, 2 * page);
    assert(write(fd, ones, 2 * page) == (ssize_t)(2 * page));
    unsigned char *data = mmap(NULL, 2 * page, PROT_READ, MAP_SHARED, fd, 0);
    assert(data != MAP_FAILED);
    assert(ftruncate(fd, (off_t)page) == 0);
    close(fd);
    unlink(path);
    free(ones);
    return data;
}

/* The signal that ends a child which runs `body`, or 0. */
static int signal_of_child(void (*body)(void))
{
    int state = 0;
    pid_t child = fork();
    if (child == 0) {
        body();
        _exit(0);
    }
    assert(waitpid(child, &state, 0) == child);
    return WIFSIGNALED(state) ? WTERMSIG(state) : 0;
}

static void reads_inside_the_guard_are_zeros_and_counted_as_lost(void)
{
    volatile unsigned char *data = shrunken();
    assert(mapguard_add((const void *)data, (int64_t)(2 * page), NULL) == COLIBRI_OK);
    mapguard_enter();
    assert(data[0] == 1 && !mapguard_lost((const void *)data));
    assert(data[page] == 0 && data[2 * page - 1] == 0);
    mapguard_leave();
    assert(mapguard_lost((const void *)data) && data[0] == 1);
    mapguard_remove((const void *)data);
    assert(!mapguard_lost((const void *)data));
    munmap((void *)data, 2 * page);
}

static void read_outside(void)
{
    volatile unsigned char *data = shrunken();
    mapguard_add((const void *)data, (int64_t)(2 * page), NULL);
    (void)data[page];
}

static void read_unknown(void)
{
    volatile unsigned char *data = shrunken();
    mapguard_enter();
    (void)data[page];
}

static void read_under_another_handler(void)
{
    volatile unsigned char *data = shrunken();
    signal(SIGBUS, _exit); /* _exit(SIGBUS): no signal ends the child */
    mapguard_enter();
    (void)data[page];
    abort();
}

static void the_handler_is_gone_after_the_last_leave(void)
{
    struct sigaction before, after;
    sigaction(SIGBUS, NULL, &before);
    mapguard_enter();
    mapguard_enter();
    mapguard_leave();
    sigaction(SIGBUS, NULL, &after);
    assert((after.sa_flags & SA_SIGINFO) != 0);
    mapguard_leave();
    sigaction(SIGBUS, NULL, &after);
    assert(before.sa_handler == after.sa_handler);
}

int main(void)
{
    page = (size_t)sysconf(_SC_PAGESIZE);
    reads_inside_the_guard_are_zeros_and_counted_as_lost();
    assert(signal_of_child(read_outside) == SIGBUS);
    assert(signal_of_child(read_unknown) == SIGBUS);
    assert(signal_of_child(read_under_another_handler) == 0);
    the_handler_is_gone_after_the_last_leave();
    return 0;
}
