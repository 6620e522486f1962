// session.hpp: what the two binding files of a session share: the names of gate modes, ids, and the way out of a long call.
#pragma once

#include <optional>

#include "handles.hpp"
#include "view.hpp"

void bind_stepping(py::class_<Session> &session);
void bind_recording(py::module_ &m, py::class_<Session> &session);

inline const std::pair<const char *, colibri_gate_mode> gate_modes[] = {
    {"softmax", COLIBRI_GATES_SOFTMAX},
    {"softmax_renormalised", COLIBRI_GATES_SOFTMAX_RENORMALISED},
    {"softmax_of_chosen", COLIBRI_GATES_SOFTMAX_OF_CHOSEN},
    {"raw_logits", COLIBRI_GATES_RAW_LOGITS},
};

inline colibri_gate_mode gate_mode_of(const std::optional<std::string> &name)
{
    if (!name)
        return COLIBRI_GATES_MODEL;
    std::string known;
    for (const auto &[text, mode] : gate_modes) {
        if (*name == text)
            return mode;
        known += std::string(known.empty() ? "'" : ", '") + text + "'";
    }
    raise(COLIBRI_ERROR_ARGUMENT, ("there is no gate mode '" + *name + "'; there are " + known + ", and None for the model's own").c_str());
}

inline colibri_watch watch_of(const std::string &name)
{
    static const char *const names[] = {"off", "watch", "stop"};
    for (int i = 0; i < 3; i++)
        if (name == names[i])
            return (colibri_watch)i;
    raise(COLIBRI_ERROR_ARGUMENT, ("there is no watch '" + name + "'; there are 'off', 'watch' and 'stop'").c_str());
}

// Called by the engine without the GIL, on the thread that called feed or step: a pending Ctrl-C or an exception of the Python function stops the pass.
struct Progress {
    py::object function; // None: only look for signals
    std::optional<py::error_already_set> error;

    static int call(void *user, double done)
    {
        auto *self = static_cast<Progress *>(user);
        py::gil_scoped_acquire hold;
        try {
            if (PyErr_CheckSignals() != 0)
                throw py::error_already_set();
            if (!self->function.is_none())
                self->function(done);
            return 0;
        } catch (py::error_already_set &error) {
            self->error.emplace(std::move(error));
            return 1;
        }
    }
};

// A copy of token ids: their array may be written by another thread meanwhile.
inline std::vector<int32_t> copy_ids(const py::array_t<int32_t, py::array::c_style> &ids)
{
    if (ids.ndim() != 1)
        throw py::value_error("ids must have one dimension");
    return std::vector<int32_t>(ids.data(), ids.data() + ids.size());
}
