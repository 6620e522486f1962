// bind_machine.cpp: what runs here, and the engine's own count of non-finite values.
#include "status.hpp"
#include "view.hpp"

static py::tuple isa_names()
{
    py::tuple names(colibri_isa_count());
    for (size_t i = 0; i < names.size(); i++)
        names[i] = colibri_isa_name(i);
    return names;
}

static py::tuple census(const py::array &array)
{
    colibri_dtype dtype = COLIBRI_F32;
    bool known = false;
    for (colibri_dtype candidate : {COLIBRI_F32, COLIBRI_F16, COLIBRI_BF16})
        if (array.dtype().equal(numpy_dtype(candidate))) {
            dtype = candidate;
            known = true;
        }
    if (!known)
        throw py::type_error("census counts float32, float16 and bfloat16; the array is " + std::string(py::str(array.dtype())));
    colibri_array described = describe(array, dtype);
    colibri_census counts;
    colibri_message message;
    check(colibri_array_census(&described, &counts, &message), message);
    return py::make_tuple(counts.n_nan, counts.n_inf, counts.n_subnormal, counts.first_nonfinite);
}

// A copy, rounded.
static py::array_t<float> rounded(const py::array_t<float, py::array::c_style> &values, int format, bool flush, bool saturate)
{
    if (format < COLIBRI_FLOAT32 || format > COLIBRI_FLOAT8_E5M2)
        throw py::value_error("the formats are 0 to " + std::to_string((int)COLIBRI_FLOAT8_E5M2));
    py::array_t<float> out(std::vector<py::ssize_t>(values.shape(), values.shape() + values.ndim()));
    std::copy(values.data(), values.data() + values.size(), out.mutable_data());
    colibri_round(out.mutable_data(), out.size(), {(colibri_format)format, flush, saturate});
    return out;
}

static py::tuple usable_cpus()
{
    colibri_cpus cpus = colibri_usable_cpus();
    return py::make_tuple(cpus.count, cpus.limit);
}

static py::tuple failed_unmaps()
{
    int64_t count, n_bytes;
    colibri_failed_unmaps(&count, &n_bytes);
    return py::make_tuple(count, n_bytes);
}

void bind_machine(py::module_ &m)
{
    m.attr("__version__") = colibri_version();
    m.def("isa", &colibri_isa, "The code path in force.");
    m.def("isa_names", &isa_names, "Code paths that this build and this CPU can run, best first.");
    m.def("usable_cpus", &usable_cpus, "(count, what says so) of the CPUs that this process may use.");
    m.def("failed_unmaps", &failed_unmaps, "(count, bytes) of mappings that the system refused to take back.");
    m.def("rounded", &rounded, py::arg("values"), py::arg("format"), py::arg("flush"), py::arg("saturate"),
          "A copy of float32 values, each the nearest number of a format: 0 float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.");
    m.def("census", &census, py::arg("array"), "(NaN, Inf, subnormal, flat index of the first non-finite value or -1), counted by bit pattern.");
}
