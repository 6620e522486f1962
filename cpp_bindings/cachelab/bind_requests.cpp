// bind_requests.cpp: streams of requests.
#include "cachelab.hpp"

using Keys = py::array_t<int32_t, py::array::c_style>;

// Whoever holds one measures a stream piece by piece.
struct Recency {
    std::vector<int32_t> order;
    cachelab_recency state;

    explicit Recency(int64_t n_keys) : order((size_t)n_keys), state{order.data(), n_keys, 0} {}
    Recency(const Recency &) = delete;
    Recency &operator=(const Recency &) = delete;

    Keys depths(const Keys &sets)
    {
        if (sets.ndim() != 2)
            throw py::value_error("sets are rows of k keys");
        for (py::ssize_t i = 0; i < sets.size(); i++)
            if (sets.data()[i] < -1 || sets.data()[i] >= state.n_keys)
                throw py::value_error("a key is -1 to " + std::to_string(state.n_keys - 1));
        Keys out({sets.shape(0), sets.shape(1)});
        const int32_t *from = sets.data();
        int32_t *to = out.mutable_data();
        py::gil_scoped_release free;
        cachelab_depths(&state, from, sets.shape(0), sets.shape(1), to);
        return out;
    }
};

void bind_requests(py::module_ &m)
{
    py::class_<Recency>(m, "Recency").def(py::init<int64_t>()).def("depths", &Recency::depths);
}
