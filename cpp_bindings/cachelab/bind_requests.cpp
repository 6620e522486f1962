// bind_requests.cpp: streams of requests: reuse distances, stacks of all capacities, caches. Every id is copied and looked at before C
// sees it, for it may come from a file that somebody else writes.
#include <limits>
#include <memory>
#include <optional>

#include "cachelab.hpp"

namespace {

using Ids = py::array_t<int32_t, py::array::c_style>;
using Whole = py::array_t<int64_t, py::array::c_style>;
using Flags = py::array_t<bool, py::array::c_style>;

void check(bool sound, const std::string &sentence)
{
    if (!sound)
        throw py::value_error(sentence);
}

int32_t positive(int64_t n, const char *what)
{
    check(n >= 1 && n <= CACHELAB_MAX_KEYS, std::string(what) + " are 1 to " + std::to_string(CACHELAB_MAX_KEYS));
    return (int32_t)n;
}

// Numbers of an array of a given shape, from `lowest` to below `end`.
void copy(const Ids &from, std::vector<int32_t> &to, const std::vector<py::ssize_t> &shape, int32_t lowest, int32_t end)
{
    check(std::vector<py::ssize_t>(from.shape(), from.shape() + from.ndim()) == shape, "an array of the piece has another shape");
    to.assign(from.data(), from.data() + from.size());
    bool sound = true;
    for (int32_t id : to)
        sound &= id >= lowest && id < end;
    check(sound, "an expert is -1 to " + std::to_string(end - 1));
}

struct Shape {
    int32_t layers, experts, k;
    int64_t keys;

    Shape(int64_t n_layers, int64_t n_experts, int64_t n_slots)
        : layers(positive(n_layers, "layers")), experts(positive(n_experts, "experts")), k(positive(n_slots, "slots")),
          keys((int64_t)layers * experts)
    {
        positive(keys, "keys");
    }
};

struct FreeRecency {
    void operator()(cachelab_recency *r) const { cachelab_recency_free(r); }
};

// Whoever holds one measures a stream piece by piece.
class Recency {
    Shape shape;
    std::unique_ptr<cachelab_recency, FreeRecency> state;
    std::vector<int64_t> counts;
    std::vector<int32_t> ids;

  public:
    Recency(int64_t layers, int64_t experts, int64_t k)
        : shape(layers, experts, k), state(cachelab_recency_new(shape.layers, shape.experts, shape.k)), counts((size_t)shape.keys + 1)
    {
        if (!state)
            throw std::bad_alloc();
    }

    std::optional<Ids> feed(const Ids &piece, bool depths)
    {
        int64_t tokens = piece.ndim() == 3 ? piece.shape(1) : 0;
        copy(piece, ids, {shape.layers, tokens, shape.k}, -1, shape.experts);
        std::optional<Ids> out;
        if (depths)
            out = Ids({(py::ssize_t)shape.layers, (py::ssize_t)tokens, (py::ssize_t)shape.k});
        int32_t *to = depths ? out->mutable_data() : nullptr;
        py::gil_scoped_release free;
        cachelab_recency_feed(state.get(), ids.data(), tokens, to, counts.data());
        return out;
    }

    Whole histogram() const { return Whole((py::ssize_t)counts.size(), counts.data()); }
};

Ids next_uses(const Ids &ids, const Whole &passes, Ids last, Ids next)
{
    check(ids.ndim() == 2 && passes.size() == ids.shape(0) && last.size() == next.size(), "a piece is (tokens, k)");
    std::vector<int32_t> copied;
    copy(ids, copied, {ids.shape(0), ids.shape(1)}, -1, (int32_t)last.size());
    Ids out({ids.shape(0), ids.shape(1)});
    int32_t *to = out.mutable_data(), *l = last.mutable_data(), *n = next.mutable_data();
    py::gil_scoped_release free;
    cachelab_next_uses(copied.data(), passes.data(), ids.shape(0), ids.shape(1), l, n, to);
    return out;
}

// What a policy is told of once, and the copies of the piece in hand.
struct Source {
    Shape shape;
    cachelab_setup setup{};
    std::vector<int64_t> sizes, bytes, uses, passes;
    std::vector<int32_t> first, ids, next, ahead;
    std::vector<uint8_t> late;

    Source(int policy, int64_t layers, int64_t experts, int64_t k, int64_t n_ahead, const std::optional<Whole> &size,
           const std::optional<Whole> &cost, const std::optional<Whole> &use, const std::optional<Ids> &soon)
        : shape(layers, experts, k)
    {
        check(policy >= 0 && policy < CACHELAB_N_POLICIES && n_ahead >= 0, "no such policy");
        setup.policy = (cachelab_policy)policy;
        setup.n_layers = shape.layers, setup.n_experts = shape.experts, setup.k = shape.k;
        setup.n_ahead = (int32_t)n_ahead;
        setup.sizes = keep(size, sizes, 1);
        setup.bytes = keep(cost, bytes, 0);
        setup.uses = keep(use, uses, 0);
        check(setup.policy != CACHELAB_STATIC || setup.uses, "static needs the uses of a profile");
        if (soon) {
            check(soon->size() == shape.keys, "a first use per key");
            first.assign(soon->data(), soon->data() + soon->size());
            setup.first = first.data();
        }
    }

    const int64_t *keep(const std::optional<Whole> &from, std::vector<int64_t> &to, int64_t lowest)
    {
        if (!from)
            return nullptr;
        check(from->size() == shape.keys, "a number per key");
        to.assign(from->data(), from->data() + from->size());
        for (int64_t x : to)
            check(x >= lowest && x <= std::numeric_limits<int64_t>::max() / (shape.keys + 1), "a size or count is out of range");
        return to.data();
    }

    cachelab_piece piece(const Whole &pass, const Ids &id, const std::optional<Ids> &soon, const std::optional<Ids> &plan,
                         const std::optional<Flags> &after, int64_t first_token)
    {
        int64_t tokens = pass.size() - 1;
        check(pass.ndim() == 1 && tokens >= 0, "a pass per token and one beyond");
        passes.assign(pass.data(), pass.data() + pass.size());
        copy(id, ids, {shape.layers, tokens, shape.k}, -1, shape.experts);
        cachelab_piece out{tokens, first_token, passes.data(), ids.data(), nullptr, nullptr, nullptr};
        check(setup.policy != CACHELAB_BELADY || (soon && setup.first), "belady needs the next uses");
        if (soon) {
            check(soon->ndim() == 3 && soon->size() == id.size(), "the next uses are of the shape of the ids");
            next.assign(soon->data(), soon->data() + soon->size());
            out.next = next.data();
        }
        if (plan) {
            copy(*plan, ahead, {shape.layers, tokens, setup.n_ahead}, -1, shape.experts);
            out.ahead = ahead.data();
        }
        if (plan && after) {
            check(after->size() == plan->size(), "late is of the shape of the plan");
            late.assign(after->data(), after->data() + after->size());
            out.late = late.data();
        }
        return out;
    }
};

struct FreeStack {
    void operator()(cachelab_stack *s) const { cachelab_stack_free(s); }
};

class Stack {
    Source source;
    std::unique_ptr<cachelab_stack, FreeStack> state;
    std::vector<int64_t> counts;

  public:
    Stack(int policy, int64_t layers, int64_t experts, int64_t k, const std::optional<Ids> &first)
        : source(policy, layers, experts, k, 0, {}, {}, {}, first), state(cachelab_stack_new(&source.setup)),
          counts((size_t)source.shape.keys + 1)
    {
        if (!state)
            throw std::bad_alloc();
    }

    void feed(const Whole &passes, const Ids &ids, const std::optional<Ids> &next)
    {
        cachelab_piece piece = source.piece(passes, ids, next, {}, {}, 0);
        py::gil_scoped_release free;
        cachelab_stack_feed(state.get(), &piece, counts.data());
    }

    Whole histogram() const { return Whole((py::ssize_t)counts.size(), counts.data()); }
};

struct FreeSim {
    void operator()(cachelab_sim *s) const { cachelab_sim_free(s); }
};

// Caches that differ in their capacity alone, fed together.
class Caches {
    Source source;
    std::vector<std::unique_ptr<cachelab_sim, FreeSim>> sims;

  public:
    Caches(int policy, int64_t layers, int64_t experts, int64_t k, int64_t n_ahead, const std::vector<std::pair<int64_t, int64_t>> &limits,
           const std::optional<Whole> &sizes, const std::optional<Whole> &bytes, const std::optional<Whole> &uses,
           const std::optional<Ids> &first)
        : source(policy, layers, experts, k, n_ahead, sizes, bytes, uses, first)
    {
        for (auto [limit, places] : limits) {
            check(limit >= 0 && places >= 0, "a capacity is 0 or more");
            sims.emplace_back(cachelab_sim_new(&source.setup, limit, places));
            if (!sims.back())
                throw std::bad_alloc();
        }
    }

    bool place(int64_t key, bool pinned)
    {
        check(key >= 0 && key < source.shape.keys, "no such key");
        bool room = true;
        for (auto &sim : sims)
            room &= cachelab_sim_place(sim.get(), (int32_t)key, pinned);
        return room;
    }

    void resize(int64_t limit, int64_t places)
    {
        check(limit >= 0 && places >= 0, "a capacity is 0 or more");
        for (auto &sim : sims) {
            check(limit >= cachelab_sim_pinned(sim.get()), "a capacity below what is pinned");
            cachelab_sim_resize(sim.get(), limit, places);
        }
    }

    void feed(const Whole &passes, const Ids &ids, const std::optional<Ids> &next, const std::optional<Ids> &ahead,
              const std::optional<Flags> &late)
    {
        cachelab_piece piece = source.piece(passes, ids, next, ahead, late, 0);
        py::gil_scoped_release free;
        for (auto &sim : sims)
            cachelab_sim_feed(sim.get(), &piece, -1, nullptr);
    }

    // The same for the first cache, and what happened in one of its layers.
    py::array_t<cachelab_event> watch(const Whole &passes, const Ids &ids, const std::optional<Ids> &next,
                                      const std::optional<Ids> &ahead, const std::optional<Flags> &late, int64_t first_token, int32_t layer)
    {
        cachelab_piece piece = source.piece(passes, ids, next, ahead, late, first_token);
        std::vector<cachelab_event> events((size_t)(source.shape.experts + piece.n_tokens * source.shape.k));
        int64_t n = cachelab_sim_feed(sims.at(0).get(), &piece, layer, events.data());
        return py::array_t<cachelab_event>(n, events.data());
    }

    Whole counts() const
    {
        Whole out({(py::ssize_t)sims.size(), (py::ssize_t)source.shape.layers, (py::ssize_t)2, (py::ssize_t)CACHELAB_N_COUNTS});
        int64_t *to = out.mutable_data();
        for (auto &sim : sims) {
            cachelab_sim_counts(sim.get(), to);
            to += source.shape.layers * 2 * CACHELAB_N_COUNTS;
        }
        return out;
    }

    int64_t used() const { return cachelab_sim_used(sims.at(0).get()); }

    int64_t pinned() const { return cachelab_sim_pinned(sims.at(0).get()); }

    Flags residents() const
    {
        Flags out({(py::ssize_t)source.shape.layers, (py::ssize_t)source.shape.experts});
        for (int64_t key = 0; key < source.shape.keys; key++)
            out.mutable_data()[key] = cachelab_sim_holds(sims.at(0).get(), (int32_t)key);
        return out;
    }
};

} // namespace

void bind_requests(py::module_ &m)
{
    PYBIND11_NUMPY_DTYPE(cachelab_event, token, slot, key, outcome, kept, evicted, n_evicted);
    py::class_<Recency>(m, "Recency")
        .def(py::init<int64_t, int64_t, int64_t>())
        .def("feed", &Recency::feed)
        .def("histogram", &Recency::histogram);
    m.def("next_uses", &next_uses);
    py::class_<Stack>(m, "Stack")
        .def(py::init<int, int64_t, int64_t, int64_t, const std::optional<Ids> &>())
        .def("feed", &Stack::feed)
        .def("histogram", &Stack::histogram);
    py::class_<Caches>(m, "Caches")
        .def(py::init<int, int64_t, int64_t, int64_t, int64_t, const std::vector<std::pair<int64_t, int64_t>> &,
                      const std::optional<Whole> &, const std::optional<Whole> &, const std::optional<Whole> &,
                      const std::optional<Ids> &>())
        .def("place", &Caches::place)
        .def("resize", &Caches::resize)
        .def("feed", &Caches::feed)
        .def("watch", &Caches::watch)
        .def("counts", &Caches::counts)
        .def("used", &Caches::used)
        .def("pinned", &Caches::pinned)
        .def("residents", &Caches::residents);
}
