// bind_session.cpp: one timeline of tokens. The GIL is released inside feed and truncate only, with no Python object in the engine's hands.
#include "blocks.hpp"
#include "session.hpp"

// (layers, points, 4) of uint8: storage format, flush, saturate, accumulation format; None emulates nothing.
static std::vector<colibri_emulation> emulation_of(const std::optional<py::array_t<uint8_t, py::array::c_style>> &table)
{
    std::vector<colibri_emulation> out;
    if (!table)
        return out;
    if (table->ndim() != 3 || table->shape(2) != 4)
        throw py::value_error("an emulation has the shape (layers, points, 4)");
    const uint8_t *entry = table->data();
    for (py::ssize_t i = 0; i < table->size(); i += 4)
        out.push_back({{(colibri_format)entry[i], entry[i + 1] != 0, entry[i + 2] != 0}, (colibri_format)entry[i + 3]});
    return out;
}

static std::unique_ptr<Session> create(const Model &model, const std::vector<std::string> &capture, int64_t max_tokens, int threads,
                                       const std::optional<std::string> &gate_mode, int64_t file_bytes,
                                       const std::optional<py::array_t<uint8_t, py::array::c_style>> &emulation, const std::string &watch)
{
    const std::vector<colibri_emulation> entries = emulation_of(emulation);
    std::vector<const char *> patterns;
    for (const std::string &pattern : capture)
        patterns.push_back(pattern.c_str());
    colibri_session_options options = {};
    options.size = sizeof options;
    options.capture = patterns.data();
    options.n_capture = patterns.size();
    options.max_tokens = max_tokens;
    options.threads = threads;
    options.gate_mode = gate_mode_of(gate_mode);
    options.file_bytes = file_bytes;
    options.emulation = entries.data();
    options.n_emulation = entries.size();
    options.watch = watch_of(watch);
    colibri_session *created = nullptr;
    colibri_message message;
    check(colibri_session_create(model.get(), &options, &created, &message), message);
    auto session = std::make_unique<Session>();
    session->handle.reset(created);
    return session;
}

static void feed(Session &session, const py::array_t<int32_t, py::array::c_style> &ids, py::object function)
{
    const std::vector<int32_t> copy = copy_ids(ids);
    Progress progress{std::move(function), std::nullopt};
    colibri_message message;
    colibri_status status;
    {
        py::gil_scoped_release release;
        status = colibri_session_feed(session.get(), copy.data(), (int64_t)copy.size(), &Progress::call, &progress, &message);
    }
    if (progress.error)
        throw std::move(*progress.error);
    check(status, message);
}

static void truncate_rows(Session &session, int64_t n_tokens)
{
    colibri_message message;
    colibri_status status;
    {
        py::gil_scoped_release release;
        status = colibri_session_truncate(session.get(), n_tokens, &message);
    }
    check(status, message);
}

static py::array tap(Session &session, size_t kind, int64_t layer, int64_t expert, int64_t pass)
{
    colibri_array array;
    colibri_lease *lease = nullptr;
    colibri_message message;
    check(colibri_session_tap(session.get(), kind, layer, expert, pass, &array, &lease, &message), message);
    return view(array, new_lease(lease));
}

static py::array logits(Session &session)
{
    colibri_array array;
    colibri_lease *lease = nullptr;
    colibri_message message;
    check(colibri_session_logits(session.get(), &array, &lease, &message), message);
    return view(array, new_lease(lease));
}

static std::pair<int64_t, int64_t> pass_bounds(const Session &session, int64_t index)
{
    int64_t start = 0, stop = 0;
    colibri_session_pass(session.get(), index, &start, &stop);
    return {start, stop};
}

static py::dict memory(const Session &session)
{
    colibri_session_memory use = colibri_session_memory_use(session.get());
    py::dict out;
    out["reserved"] = use.reserved;
    out["tape"] = use.tape;
    out["kv_cache"] = use.kv_cache;
    out["scratch"] = use.scratch;
    out["copied_bytes"] = use.copied_bytes;
    return out;
}

// One tuple for each point of the model, as colibri_watch_row has it, but the point as its index.
static py::list watch_table(const Session &session)
{
    std::vector<colibri_watch_row> rows(colibri_session_watch(session.get(), nullptr, 0));
    colibri_session_watch(session.get(), rows.data(), rows.size());
    py::list out;
    for (const colibri_watch_row &r : rows)
        out.append(py::make_tuple(r.point, r.layer, r.n, r.n_nan, r.n_signalling, r.n_inf, r.n_negative_inf, r.n_subnormal, r.largest,
                                  r.token, r.expert, r.index, r.bits));
    return out;
}

static py::tuple blocks(const Session &session)
{
    colibri_block found[COLIBRI_SESSION_BLOCKS];
    colibri_session_blocks(session.get(), found);
    return describe_blocks(found, COLIBRI_SESSION_BLOCKS);
}

void bind_session(py::module_ &m)
{
    py::class_<Session> session(m, "Session");
    session.def(py::init(&create), py::arg("model"), py::arg("capture"), py::arg("max_tokens"), py::arg("threads"), py::arg("gate_mode"),
                py::arg("file_bytes") = 0, py::arg("emulation") = py::none(), py::arg("watch") = "off")
        .def("feed", &feed, py::arg("ids"), py::arg("progress"))
        .def("truncate", &truncate_rows, py::arg("n_tokens"))
        .def("tap", &tap, py::arg("kind"), py::arg("layer"), py::arg("expert"), py::arg("pass_index"))
        .def("captures", [](const Session &s, size_t kind, int64_t layer) { return colibri_session_captures(s.get(), kind, layer); },
             py::arg("kind"), py::arg("layer"))
        .def("logits", &logits)
        .def("pass_bounds", &pass_bounds, py::arg("index"), "(start, stop) in tokens; (0, 0) when there is no such pass.")
        .def("memory", &memory)
        .def("watch_table", &watch_table, "What was counted at each point; empty when nothing is watched.")
        .def("blocks", &blocks, "The tape, scratch, and the logits of the last pass and of the next.")
        .def_property_readonly("length", [](const Session &s) { return colibri_session_length(s.get()); })
        .def_property_readonly("pass_count", [](const Session &s) { return colibri_session_pass_count(s.get()); })
        .def_property_readonly("truncations", [](const Session &s) { return colibri_session_truncations(s.get()); })
        .def_property_readonly("max_tokens", [](const Session &s) { return colibri_session_max_tokens(s.get()); })
        .def_property_readonly("threads", [](const Session &s) { return colibri_session_threads(s.get()); })
        .def_property_readonly("threads_asked", [](const Session &s) { return colibri_session_threads_asked(s.get()); });
    bind_stepping(session);
    bind_recording(m, session);
}
