// cachelab.hpp: the first include of every file of this module.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "colibri_cachelab.h"

namespace py = pybind11;

void bind_pages(py::module_ &m);
void bind_limits(py::module_ &m);
void bind_hierarchy(py::module_ &m);
void bind_requests(py::module_ &m);
void bind_stages(py::module_ &m);
void bind_work(py::module_ &m);
