// pybind.hpp: the first include of every binding file. Only the public header of the engine is visible from here on.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "colibri.h"

namespace py = pybind11;

// One function per category; module.cpp calls them in order.
void bind_machine(py::module_ &m);
void bind_taps(py::module_ &m);
void bind_model(py::module_ &m);
void bind_session(py::module_ &m);
