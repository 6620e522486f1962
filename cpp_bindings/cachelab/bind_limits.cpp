// bind_limits.cpp: what the machine can do at best.
#include "cachelab.hpp"

// Seconds; below 0 when the threads cannot be made. Each thread reads some rows.
static double read_seconds(const py::array_t<uint8_t, py::array::c_style> &rows, int threads, int streams, int ahead)
{
    if (rows.ndim() != 2)
        throw py::value_error("memory to be read comes as rows");
    const cachelab_stream stream = {rows.data(), rows.shape(0), rows.shape(1)};
    py::gil_scoped_release free;
    return cachelab_read_seconds(&stream, 1, threads, streams, ahead);
}

static double fma_rate(const std::string &isa, int threads, int64_t rounds)
{
    py::gil_scoped_release free;
    return cachelab_fma_rate(isa.c_str(), threads, rounds);
}

void bind_limits(py::module_ &m)
{
    m.def("read_seconds", &read_seconds, py::arg("rows"), py::arg("threads"), py::arg("streams"), py::arg("ahead"));
    m.def("fma_rate", &fma_rate, py::arg("isa"), py::arg("threads"), py::arg("rounds"));
}
