// module.cpp: colibri_lab._cachelab, a table of contents. Private: users see colibri_lab.cache, whose Python files wrap it. It needs
// no engine, so that an analysis runs where there is none.
#include "cachelab.hpp"

PYBIND11_MODULE(_cachelab, m)
{
    m.doc() = "What the workbench asks of caches and of the machine, in C.";
    bind_pages(m);
    bind_limits(m);
    bind_hierarchy(m);
    bind_requests(m);
    bind_stages(m);
    bind_work(m);
}
