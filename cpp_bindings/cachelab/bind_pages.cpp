// bind_pages.cpp: pages of mapped files. A range is (file, offset, address, bytes); an answer is (status, reason, numbers).
#include "cachelab.hpp"

struct Range {
    std::string file;
    cachelab_range range;

    Range(const py::bytes &path, int64_t offset, uintptr_t address, int64_t n_bytes)
        : file(path), range{file.c_str(), offset, reinterpret_cast<const void *>(address), n_bytes}
    {
    }
    Range(const Range &) = delete;
    Range &operator=(const Range &) = delete;
};

static py::tuple resident(const Range &of)
{
    cachelab_reason reason{};
    int64_t count = 0;
    cachelab_status status;
    {
        py::gil_scoped_release free;
        status = cachelab_resident(&of.range, &count, nullptr, &reason);
    }
    return py::make_tuple((int)status, reason.text, count);
}

static py::tuple resident_pages(const Range &of)
{
    cachelab_reason reason{};
    int64_t page = cachelab_page_bytes(), first = of.range.offset / page, count = 0;
    int64_t n_pages = of.range.n_bytes > 0 ? (of.range.offset + of.range.n_bytes + page - 1) / page - first : 0;
    py::array_t<uint8_t> pages(n_pages);
    uint8_t *to = pages.mutable_data();
    cachelab_status status;
    {
        py::gil_scoped_release free;
        status = cachelab_resident(&of.range, &count, to, &reason);
    }
    return py::make_tuple((int)status, reason.text, pages);
}

static py::tuple drop(const Range &of)
{
    cachelab_reason reason{};
    int64_t left = 0;
    cachelab_status status;
    {
        py::gil_scoped_release free;
        status = cachelab_drop(&of.range, &left, &reason);
    }
    return py::make_tuple((int)status, reason.text, left);
}

template <cachelab_status (*call)(const cachelab_range *, cachelab_reason *)>
static py::tuple asked(const Range &of)
{
    cachelab_reason reason{};
    cachelab_status status;
    {
        py::gil_scoped_release free;
        status = call(&of.range, &reason);
    }
    return py::make_tuple((int)status, reason.text);
}

static py::tuple told(const py::bytes &file)
{
    cachelab_reason reason{};
    cachelab_status status = cachelab_residency_told(std::string(file).c_str(), &reason);
    return py::make_tuple((int)status, reason.text);
}

static py::tuple faults()
{
    cachelab_reason reason{};
    int64_t minor = 0, major = 0;
    cachelab_status status = cachelab_faults(&minor, &major, &reason);
    return py::make_tuple((int)status, reason.text, minor, major);
}

void bind_pages(py::module_ &m)
{
    py::class_<Range>(m, "PageRange")
        .def(py::init<const py::bytes &, int64_t, uintptr_t, int64_t>(), py::arg("file"), py::arg("offset"), py::arg("address"), py::arg("n_bytes"))
        .def("resident", &resident)
        .def("resident_pages", &resident_pages)
        .def("drop", &drop)
        .def("warm", &asked<cachelab_warm>)
        .def("lock", &asked<cachelab_lock>)
        .def("unlock", &asked<cachelab_unlock>);
    m.def("page_bytes", &cachelab_page_bytes);
    m.def("residency_told", &told, py::arg("file"));
    m.def("page_faults", &faults);
}
