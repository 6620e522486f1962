// bind_recording.cpp: a session whose tape is a piece of a file, and the one write that other readers of the file must not see half done.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // F_SETLEASE, F_SETSIG
#endif
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "session.hpp"

static void map_tape(Session &session, int file, int64_t offset, int64_t n_tokens)
{
    colibri_message message;
    colibri_status status;
    {
        py::gil_scoped_release release;
        status = colibri_session_map(session.get(), file, offset, n_tokens, &message);
    }
    check(status, message);
}

static std::optional<std::tuple<int64_t, int64_t, int64_t>> place(const Session &session, size_t kind, int64_t layer)
{
    colibri_tape_place p;
    if (!colibri_session_place(session.get(), kind, layer, &p))
        return std::nullopt;
    return std::tuple(p.offset, p.row_bytes, p.n_rows);
}

#ifdef F_SETLEASE
// While one has a lease for writing, whoever opens the file waits inside open. There is none to be had while somebody has it open: such a reader
// gets `seconds` to read the header before it is written all the same.
static bool take_lease(int file, double seconds)
{
    timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    if (fcntl(file, F_SETSIG, SIGURG) != 0) // what an opener raises here: a signal that nobody notices, not SIGIO, which ends a process
        return false;
    while (fcntl(file, F_SETLEASE, F_WRLCK) != 0) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (errno != EAGAIN || (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) > seconds)
            return false; // no rest between two tries: who opens the file again and again leaves it closed for microseconds only
    }
    return true;
}
#endif

// The GIL is released throughout: who waits inside open may hold it.
static bool write_alone(int file, const py::bytes &data, int64_t offset, double seconds)
{
    const char *bytes = PyBytes_AS_STRING(data.ptr());
    size_t n_bytes = (size_t)PyBytes_GET_SIZE(data.ptr()), done = 0;
    int error = 0;
    bool leased = false;
    {
        py::gil_scoped_release release;
#ifdef F_SETLEASE
        leased = take_lease(file, seconds);
#else
        (void)seconds;
#endif
        while (done < n_bytes && error == 0) {
            ssize_t n = pwrite(file, bytes + done, n_bytes - done, (off_t)(offset + (int64_t)done));
            if (n >= 0)
                done += (size_t)n;
            else if (errno != EINTR)
                error = errno;
        }
#ifdef F_SETLEASE
        if (leased)
            fcntl(file, F_SETLEASE, F_UNLCK);
#endif
    }
    if (error != 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    return leased;
}

void bind_recording(py::module_ &m, py::class_<Session> &session)
{
    session.def("map", &map_tape, py::arg("file"), py::arg("offset"), py::arg("n_tokens"), "Moves the tape into an open file.")
        .def("place", &place, py::arg("kind"), py::arg("layer"), "(offset, bytes of a row, rows) of a tap in the tape, or None.");
    m.def("write_alone", &write_alone, py::arg("file"), py::arg("data"), py::arg("offset"), py::arg("seconds"),
          "Writes a file at `offset` while nobody else has it open: True; or, after `seconds`, all the same: False.");
}
