/* mapguard.c: see mapguard.h. The handler does two things only: it walks a list that never shrinks, and it calls mmap, which on the systems
 * we run on is a bare system call and therefore safe there. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "mapguard.h"
#include "atomics.h"
#include "instant.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Entries are reused but never freed, so that a handler may walk them while another thread adds or removes. begin == 0: unused. */
typedef struct guarded {
    uintptr_t begin, end; /* atomic */
    int lost;              /* atomic */
    struct guarded *next; /* fixed once published */
} guarded;

static guarded *first_guarded;
static int64_t n_inside; /* this, the fields below and additions to the list: within an instant (instant.h) */
static struct sigaction previous;
static uintptr_t page_size;

static guarded *find(uintptr_t address)
{
    for (guarded *g = atomic_load_acquire(&first_guarded); g != NULL; g = g->next) {
        uintptr_t begin = atomic_load_acquire(&g->begin);
        if (begin != 0 && address >= begin && address < atomic_load_acquire(&g->end))
            return g;
    }
    return NULL;
}

/* What would have happened without us. A default action is restored and the faulting read repeated, so the process ends as it would have. */
static void pass_on(int number, siginfo_t *info, void *context)
{
    if ((previous.sa_flags & SA_SIGINFO) != 0)
        previous.sa_sigaction(number, info, context);
    else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN)
        signal(number, SIG_DFL);
    else
        previous.sa_handler(number);
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    uintptr_t address = (uintptr_t)info->si_addr;
    guarded *g = info->si_code > 0 ? find(address) : NULL; /* si_code <= 0: sent by a process, not by a read */
    void *page = (void *)(address & ~(page_size - 1));
    if (g != NULL && mmap(page, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page)
        atomic_store_release(&g->lost, 1);
    else
        pass_on(number, info, context);
}

colibri_status mapguard_add(const void *data, int64_t n_bytes, colibri_message *message)
{
    colibri_status status = COLIBRI_OK;
    instant_begin();
    guarded *g = first_guarded;
    while (g != NULL && g->begin != 0)
        g = g->next;
    if (g == NULL && (g = calloc(1, sizeof *g)) != NULL) {
        g->next = first_guarded;
        atomic_store_release(&first_guarded, g);
    }
    if (g != NULL) {
        atomic_store_release(&g->lost, 0);
        atomic_store_release(&g->end, (uintptr_t)data + (uintptr_t)n_bytes);
        atomic_store_release(&g->begin, (uintptr_t)data);
    } else {
        status = fail(message, COLIBRI_ERROR_MEMORY, "no memory for %zu bytes of bookkeeping for a mapped file", sizeof *g);
    }
    instant_end();
    return status;
}

void mapguard_remove(const void *data)
{
    instant_begin();
    for (guarded *g = first_guarded; g != NULL; g = g->next)
        if (g->begin == (uintptr_t)data)
            atomic_store_release(&g->begin, 0);
    instant_end();
}

void mapguard_enter(void)
{
    instant_begin();
    if (n_inside++ == 0) {
        struct sigaction ours = {0};
        page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
        ours.sa_sigaction = on_bus_error;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, &previous);
    }
    instant_end();
}

void mapguard_leave(void)
{
    instant_begin();
    if (--n_inside == 0) {
        struct sigaction current;
        sigaction(SIGBUS, NULL, &current);
        if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_bus_error) /* else somebody came after us: leave theirs */
            sigaction(SIGBUS, &previous, NULL);
    }
    instant_end();
}

bool mapguard_lost(const void *data)
{
    const guarded *g = find((uintptr_t)data);
    return g != NULL && atomic_load_acquire(&g->lost) != 0;
}
