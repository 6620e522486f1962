/* select.c: which table of kernels runs. The whole policy is the ladder in find_tables(), best to plain; it is walked once per process. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../utils/status.h"
#include "tables.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const kernels *available[4];
static size_t n_available;
static const kernels *in_force;
static char requested[32]; /* COLIBRI_ISA, cut; empty when not set */

static void find_tables(void)
{
    available[n_available++] = &kernels_scalar;

    const char *name = getenv("COLIBRI_ISA");
    in_force = available[0];
    if (name == NULL)
        return;
    strncpy(requested, name, sizeof requested - 1);
    for (size_t i = 0; i < n_available; i++)
        if (strcmp(requested, available[i]->name) == 0)
            in_force = available[i];
}

const kernels *kernels_in_force(void)
{
    pthread_once(&once, find_tables);
    return in_force;
}

size_t kernels_available(const kernels *const **tables)
{
    pthread_once(&once, find_tables);
    *tables = available;
    return n_available;
}

colibri_status kernels_select(colibri_message *message)
{
    pthread_once(&once, find_tables);
    if (requested[0] == '\0' || strcmp(requested, in_force->name) == 0)
        return COLIBRI_OK;
    char names[64] = "";
    for (size_t i = 0; i < n_available; i++) {
        strcat(names, i > 0 ? ", " : "");
        strcat(names, available[i]->name);
    }
    return fail(message, COLIBRI_ERROR_UNSUPPORTED, "COLIBRI_ISA=%s is not available here; this build and CPU can run: %s", requested, names);
}
