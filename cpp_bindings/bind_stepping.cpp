// bind_stepping.cpp: a pass run stage by stage. The GIL is released while the engine computes or copies rows, with no Python object in its hands.
#include "session.hpp"

using Place = std::tuple<std::string, int64_t, int64_t>;

static Place place_of(const colibri_place &p)
{
    return {colibri_stage_name(p.stage), p.layer, p.expert};
}

static void begin(Session &session, const py::array_t<int32_t, py::array::c_style> &ids)
{
    const std::vector<int32_t> copy = copy_ids(ids);
    colibri_message message;
    check(colibri_session_begin(session.get(), copy.data(), (int64_t)copy.size(), &message), message);
}

static Place step(Session &session, py::object function)
{
    Progress progress{std::move(function), std::nullopt};
    colibri_place done;
    colibri_message message;
    colibri_status status;
    {
        py::gil_scoped_release release;
        status = colibri_session_step(session.get(), &Progress::call, &progress, &done, &message);
    }
    if (progress.error)
        throw std::move(*progress.error);
    check(status, message);
    return place_of(done);
}

static std::optional<Place> next_stage(const Session &session)
{
    colibri_place next;
    return colibri_session_next(session.get(), &next) ? std::optional<Place>(place_of(next)) : std::nullopt;
}

static std::optional<std::pair<int64_t, int64_t>> open_pass(const Session &session)
{
    int64_t start, stop;
    return colibri_session_open_pass(session.get(), &start, &stop) ? std::optional(std::pair(start, stop)) : std::nullopt;
}

template <colibri_status (*call)(colibri_session *, colibri_message *)> static void without_gil(Session &session)
{
    colibri_message message;
    colibri_status status;
    {
        py::gil_scoped_release release;
        status = call(session.get(), &message);
    }
    check(status, message);
}

template <auto call> static py::array open_rows(Session &session, size_t kind, int64_t layer, int64_t expert, bool writable)
{
    colibri_array array;
    colibri_lease *lease = nullptr;
    colibri_message message;
    check(call(session.get(), kind, layer, expert, &array, &lease, &message), message);
    return view(array, new_lease(lease), writable);
}

static py::array open_tap(Session &session, size_t kind, int64_t layer, int64_t expert)
{
    return open_rows<&colibri_session_open_tap>(session, kind, layer, expert, false);
}

static py::array open_edit(Session &session, size_t kind, int64_t layer, int64_t expert)
{
    return open_rows<&colibri_session_open_edit>(session, kind, layer, expert, true);
}

static void open_write(Session &session, size_t kind, int64_t layer, int64_t expert, const py::array &given)
{
    colibri_dtype dtype = engine_dtype(given.dtype(), "these rows are");
    const py::array rows = py::array::ensure(given, py::array::c_style);
    if (!rows)
        throw py::error_already_set();
    const colibri_array described = describe(rows, dtype);
    colibri_message message;
    check(colibri_session_open_write(session.get(), kind, layer, expert, &described, &message), message);
}

static void route_again(Session &session, const std::optional<std::string> &gate_mode, int64_t k, int64_t first, int64_t count, bool keep_ids)
{
    colibri_message message;
    check(colibri_session_route_again(session.get(), gate_mode_of(gate_mode), k, first, count, keep_ids, &message), message);
}

static std::unique_ptr<Session> fork_session(Session &session, int64_t n_tokens)
{
    colibri_session *created = nullptr;
    colibri_message message;
    colibri_status status;
    {
        py::gil_scoped_release release;
        status = colibri_session_fork(session.get(), n_tokens, &created, &message);
    }
    check(status, message);
    auto fork = std::make_unique<Session>();
    fork->handle.reset(created);
    return fork;
}

// An object of another compiled module: its observer() is a capsule of the argument, whose context is a colibri_observer.
static void observe(Session &session, py::object observer)
{
    colibri_observer function = nullptr;
    void *argument = nullptr;
    if (!observer.is_none()) {
        const py::object capsule = observer.attr("observer")();
        argument = PyCapsule_GetPointer(capsule.ptr(), "colibri_observer");
        if (argument == nullptr)
            throw py::error_already_set();
        function = reinterpret_cast<colibri_observer>(PyCapsule_GetContext(capsule.ptr()));
    }
    colibri_message message;
    check(colibri_session_observe(session.get(), function, argument, &message), message);
    session.observer = std::move(observer);
}

void bind_stepping(py::class_<Session> &session)
{
    session.def("begin", &begin, py::arg("ids"), "Opens a pass of these tokens; nothing is computed yet.")
        .def("step", &step, py::arg("progress"), "Runs the next stage; (stage, layer, expert) of what was completed.")
        .def("next_stage", &next_stage, "What step would run; None when no pass is open.")
        .def("open_pass", &open_pass, "(start, stop) of the open pass in tokens of the session, or None.")
        .def("abandon", &without_gil<&colibri_session_abandon>, "Drops the open pass.")
        .def("open_tap", &open_tap, py::arg("kind"), py::arg("layer"), py::arg("expert"))
        .def("open_edit", &open_edit, py::arg("kind"), py::arg("layer"), py::arg("expert"))
        .def("open_write", &open_write, py::arg("kind"), py::arg("layer"), py::arg("expert"), py::arg("rows"))
        .def("route_again", &route_again, py::arg("gate_mode"), py::arg("k"), py::arg("first"), py::arg("count"), py::arg("keep_ids"))
        .def("observe", &observe, py::arg("observer"), "Tells it of every stage as it begins and ends; None: nobody.")
        .def("fork", &fork_session, py::arg("n_tokens"), "A session of its own with a copy of the closed rows up to n_tokens.")
        .def("move", &without_gil<&colibri_session_move>, "Away from every view of the tape: a fresh block, when there is one.");
}
