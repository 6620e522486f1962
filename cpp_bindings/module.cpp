// module.cpp: colibri_lab._core, a table of contents. Private: users see colibri_lab, whose Python files wrap these classes.
#include "pybind.hpp"

PYBIND11_MODULE(_core, m)
{
    m.doc() = "The Colibri engine: models, sessions, and zero-copy views of their memory.";
    bind_machine(m);
    bind_taps(m);
    bind_model(m);
    bind_session(m);
}
