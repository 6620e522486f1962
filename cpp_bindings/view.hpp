// view.hpp: the one maker of arrays over engine memory.
//
// An array's base is a Lease, a Python object that keeps the memory alive and is no buffer: NumPy then refuses to make the array, or any view,
// slice or memoryview of it, writable. Only memory whose address is fixed is shown: blocks never move, mapped files never move.
#pragma once

#include <memory>

#include "status.hpp"

struct Lease {
    explicit Lease(colibri_lease *lease) : handle(lease, &colibri_lease_release) {}
    std::unique_ptr<colibri_lease, decltype(&colibri_lease_release)> handle;
};

// A new reference to a Python Lease; MemoryError when the engine had no memory for one.
inline py::object new_lease(colibri_lease *lease)
{
    if (lease == nullptr)
        throw std::bad_alloc();
    return py::cast(std::make_unique<Lease>(lease));
}

inline py::dtype numpy_dtype(colibri_dtype dtype)
{
    switch (dtype) {
    case COLIBRI_F32: return py::dtype("float32");
    case COLIBRI_F16: return py::dtype("float16");
    case COLIBRI_BF16: return py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16")); // NumPy has none of its own
    case COLIBRI_I32: return py::dtype("int32");
    case COLIBRI_I64: return py::dtype("int64");
    }
    throw std::logic_error("the engine named a dtype that view.hpp does not know");
}

inline int64_t element_count(const colibri_array &array)
{
    int64_t n = 1;
    for (int d = 0; d < array.n_dims; d++)
        n *= array.shape[d];
    return n;
}

inline bool is_aligned(const colibri_array &array)
{
    return (uintptr_t)array.data % colibri_dtype_size(array.dtype) == 0;
}

// `base` keeps the memory alive and must offer no writable buffer. Only rows of an open pass are ever shown writable.
inline py::array view(const colibri_array &array, py::object base, bool writable = false)
{
    alignas(64) static const char nothing[64] = {0}; // an array without elements still needs an address, or NumPy makes memory of its own
    const void *data = element_count(array) == 0 ? nothing : array.data;
    std::vector<py::ssize_t> shape(array.shape, array.shape + array.n_dims), strides(array.strides, array.strides + array.n_dims);
    py::array out(numpy_dtype(array.dtype), std::move(shape), std::move(strides), data, std::move(base));
    if (!writable)
        out.attr("setflags")(py::arg("write") = false); // pybind11 has no read-only constructor
    return out;
}

// For a tensor that its file places at an address NumPy should not read through: an aligned copy, as read-only as a view (its base is `bytes`).
inline py::array aligned_copy(colibri_array array)
{
    py::bytes copy(static_cast<const char *>(array.data), (size_t)element_count(array) * colibri_dtype_size(array.dtype));
    array.data = PyBytes_AS_STRING(copy.ptr());
    return view(array, std::move(copy));
}

// The engine's name of a dtype; an ArgumentError beginning with `what` when it has none.
inline colibri_dtype engine_dtype(const py::dtype &dtype, const char *what)
{
    for (colibri_dtype candidate : {COLIBRI_F32, COLIBRI_I32, COLIBRI_I64, COLIBRI_F16, COLIBRI_BF16})
        if (dtype.equal(numpy_dtype(candidate)))
            return candidate;
    raise(COLIBRI_ERROR_ARGUMENT, (std::string(what) + " " + std::string(py::str(dtype)) + ", which the engine does not have").c_str());
}

// NumPy's array as the engine describes arrays; the caller keeps `array` alive. Contiguous or not.
inline colibri_array describe(const py::array &array, colibri_dtype dtype)
{
    colibri_array out = {};
    if (array.ndim() > COLIBRI_MAX_DIMS)
        throw py::value_error("an array of more than " + std::to_string(COLIBRI_MAX_DIMS) + " dimensions");
    out.data = array.data();
    out.dtype = dtype;
    out.n_dims = (int)array.ndim();
    for (int d = 0; d < out.n_dims; d++) {
        out.shape[d] = array.shape(d);
        out.strides[d] = array.strides(d);
    }
    return out;
}
