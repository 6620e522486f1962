// bind_stages.cpp: what each stage of a pass takes, and what the CPU counts meanwhile.
#include "cachelab.hpp"

// Open them before the session whose threads they are to count is made.
struct Counters {
    cachelab_counters state;

    Counters() { cachelab_counters_open(&state, &cachelab_open_system_event); }
    ~Counters() { cachelab_counters_close(&state); }
    Counters(const Counters &) = delete;
    Counters &operator=(const Counters &) = delete;

    py::dict errors() const // name -> errno; 0: it counts
    {
        py::dict out;
        for (int i = 0; i < CACHELAB_COUNTERS; i++)
            out[cachelab_counter_name(i)] = state.errors[i];
        return out;
    }
};

static std::string reason(int error, int paranoid)
{
    char text[CACHELAB_REASON_SIZE];
    cachelab_counter_reason(error, paranoid, text);
    return text;
}

// What Session.observe takes: it asks for `observer`, a capsule of the argument whose context is the function.
struct Stages {
    std::vector<cachelab_stage_sum> sums;
    cachelab_stages state{};
    py::object counters;

    Stages(int64_t n_layers, bool faults, py::object counted) : sums((size_t)(n_layers + 1) * CACHELAB_STAGES), counters(std::move(counted))
    {
        state.sums = sums.data();
        state.n_layers = n_layers;
        state.faults = faults;
        state.counters = counters.is_none() ? nullptr : &counters.cast<Counters &>().state;
    }
    Stages(const Stages &) = delete;
    Stages &operator=(const Stages &) = delete;

    py::capsule observer()
    {
        py::capsule argument(&state, "colibri_observer");
        if (PyCapsule_SetContext(argument.ptr(), reinterpret_cast<void *>(&cachelab_stages_observe)) != 0)
            throw py::error_already_set();
        return argument;
    }

    // (layers + 1, stages, 5 + counters): calls, seconds, minor faults, major faults, share of the time that counters ran, events.
    py::array_t<double> take()
    {
        enum { FIRST = 5 };
        py::array_t<double> out({(py::ssize_t)(state.n_layers + 1), (py::ssize_t)CACHELAB_STAGES, (py::ssize_t)(FIRST + CACHELAB_COUNTERS)});
        double *to = out.mutable_data();
        for (cachelab_stage_sum &sum : sums) {
            uint64_t enabled = 0, running = 0;
            *to++ = (double)sum.calls;
            *to++ = sum.seconds;
            *to++ = (double)sum.minor_faults;
            *to++ = (double)sum.major_faults;
            for (const cachelab_count &count : sum.counts) {
                enabled += count.enabled;
                running += count.running;
            }
            *to++ = enabled == 0 ? NAN : (double)running / (double)enabled;
            for (const cachelab_count &count : sum.counts)
                *to++ = cachelab_scaled(count);
            sum = {};
        }
        return out;
    }
};

void bind_stages(py::module_ &m)
{
    py::class_<Counters>(m, "Counters").def(py::init<>()).def("errors", &Counters::errors);
    m.def("counter_reason", &reason, py::arg("error"), py::arg("paranoid"));
    m.def("perf_event_paranoid", &cachelab_perf_event_paranoid);
    py::class_<Stages>(m, "Stages")
        .def(py::init<int64_t, bool, py::object>(), py::arg("n_layers"), py::arg("faults"), py::arg("counters"))
        .def("observer", &Stages::observer)
        .def("take", &Stages::take, "The sums so far, which then begin anew.")
        .def_property_readonly("tile_tokens", [](const Stages &s) { return s.state.tile_tokens; });
}
