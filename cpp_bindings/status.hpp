// status.hpp: the one door from a status to a Python exception. The classes live in colibri_lab.errors; the engine's sentence is kept.
#pragma once

#include <cstring>

#include "pybind.hpp"

inline const char *error_class(colibri_status status)
{
    switch (status) {
    case COLIBRI_ERROR_FILE: return "FileError";
    case COLIBRI_ERROR_FORMAT: return "FormatError";
    case COLIBRI_ERROR_UNSUPPORTED: return "UnsupportedError";
    case COLIBRI_ERROR_ARGUMENT: return "ArgumentError";
    case COLIBRI_ERROR_CAPACITY: return "CapacityError";
    case COLIBRI_ERROR_MEMORY: return "OutOfMemoryError";
    case COLIBRI_ERROR_BUSY: return "BusyError";
    case COLIBRI_ERROR_NOT_CAPTURED: return "NotCapturedError";
    case COLIBRI_ERROR_NONFINITE: return "NonFiniteError";
    case COLIBRI_ERROR_INTERRUPTED:
    case COLIBRI_OK: break; // a progress callback that stops a pass has an exception of its own (bind_session.cpp)
    }
    return "ColibriError";
}

// A message may hold bytes of a broken file; what is not UTF-8 is shown as \xNN.
[[noreturn]] inline void raise(colibri_status status, const char *text)
{
    py::object type = py::module_::import("colibri_lab.errors").attr(error_class(status));
    py::object sentence = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace"));
    if (sentence)
        PyErr_SetObject(type.ptr(), sentence.ptr());
    throw py::error_already_set();
}

inline void check(colibri_status status, const colibri_message &message)
{
    if (status != COLIBRI_OK)
        raise(status, message.text);
}
