// handles.hpp: the engine's two objects as C++ values. Each owns one reference; an empty handle has been closed.
#pragma once

#include <memory>

#include "status.hpp"

struct Model {
    std::unique_ptr<colibri_model, decltype(&colibri_model_release)> handle{nullptr, &colibri_model_release};

    colibri_model *get() const
    {
        if (!handle)
            raise(COLIBRI_OK, "the model is closed; open it again with lab.open");
        return handle.get();
    }
};

struct Session {
    std::unique_ptr<colibri_session, decltype(&colibri_session_release)> handle{nullptr, &colibri_session_release};
    py::object observer; // whose memory the session writes to as stages begin and end

    colibri_session *get() const { return handle.get(); }
};
