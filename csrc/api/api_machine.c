#include "../kernels/kernels.h"
#include "../utils/pages.h"
#include "../utils/threads.h"

const char *colibri_isa(void)
{
    return kernels_in_force()->name;
}

size_t colibri_isa_count(void)
{
    const kernels *const *tables;
    return kernels_available(&tables);
}

const char *colibri_isa_name(size_t index)
{
    const kernels *const *tables;
    return index < kernels_available(&tables) ? tables[index]->name : NULL;
}

colibri_cpus colibri_usable_cpus(void)
{
    colibri_cpus cpus;
    (void)threads_usable_cpus(&cpus, NULL); /* a session refuses a wrong COLIBRI_CPUS with a sentence */
    return cpus;
}

void colibri_failed_unmaps(int64_t *count, int64_t *n_bytes)
{
    pages_failures(count, n_bytes);
}

const char *colibri_version(void)
{
    return COLIBRI_VERSION;
}
