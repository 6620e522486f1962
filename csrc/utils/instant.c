#include "instant.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void hold(void)
{
    pthread_mutex_lock(&lock);
}

static void let_go(void)
{
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    (void)pthread_atfork(hold, let_go, let_go); /* fails only without memory, and then a fork is as unsafe as it always was */
}

void instant_begin(void)
{
    pthread_once(&once, watch_forks);
    hold();
}

void instant_end(void)
{
    let_go();
}
