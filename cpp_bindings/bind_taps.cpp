// bind_taps.cpp: the engine's table of taps, row by row, and the lease that every view holds. A new row in C appears in Python without an edit here.
#include "view.hpp"

static const char *const scope_names[] = {"model", "layer", "moe", "shared", "dense", "expert"};
static const char *const level_names[] = {"none", "routing", "moe", "all", "named"};

static py::tuple tap_kinds()
{
    py::object make = py::module_::import("collections").attr("namedtuple")("TapKind", "path scope dtype level axes what");
    size_t count = 0;
    const colibri_tap_kind *kinds = colibri_tap_kinds(&count);
    py::tuple out(count);
    for (size_t i = 0; i < count; i++)
        out[i] = make(kinds[i].path, scope_names[kinds[i].scope], numpy_dtype(kinds[i].dtype), level_names[kinds[i].level], kinds[i].axes, kinds[i].what);
    return out;
}

static py::tuple point_kinds()
{
    py::object make = py::module_::import("collections").attr("namedtuple")("PointKind", "path stage tap");
    size_t count = 0;
    const colibri_tap_kind *taps = colibri_tap_kinds(nullptr);
    const colibri_point_kind *kinds = colibri_point_kinds(&count);
    py::tuple out(count);
    for (size_t i = 0; i < count; i++)
        out[i] = make(kinds[i].path, colibri_stage_name(kinds[i].stage), taps[kinds[i].tap].path);
    return out;
}

static std::pair<uintptr_t, int64_t> range(const Lease &lease)
{
    const void *data = nullptr;
    int64_t n_bytes = 0;
    colibri_lease_range(lease.handle.get(), &data, &n_bytes);
    return {(uintptr_t)data, n_bytes};
}

void bind_taps(py::module_ &m)
{
    py::class_<Lease>(m, "Lease", "Keeps one block of engine memory alive, and its closed rows unchanged.")
        .def_property_readonly("address", [](const Lease &lease) { return range(lease).first; }, "Where the block begins; 0 for mapped files.")
        .def_property_readonly("bytes", [](const Lease &lease) { return range(lease).second; }, "Length of the block; 0 for mapped files.");
    m.attr("tap_kinds") = tap_kinds();
    m.attr("point_kinds") = point_kinds();
}
