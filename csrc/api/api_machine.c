#include "../kernels/kernels.h"
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

int colibri_default_threads(void)
{
    return threads_default_count();
}

const char *colibri_version(void)
{
    return COLIBRI_VERSION;
}
