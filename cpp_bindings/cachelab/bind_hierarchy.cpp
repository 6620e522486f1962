// bind_hierarchy.cpp: caches and TLBs over a stream of addresses.
#include "cachelab.hpp"

static const int64_t CACHELAB_MAX_WAYS = (int64_t)1 << 28; // of all sets of a table

using Addresses = py::array_t<int64_t, py::array::c_style>;

// Tables in the order in which they are asked, each (bits of an address within a block, sets, ways).
struct Chain {
    std::vector<std::vector<int64_t>> tags;
    std::vector<cachelab_table> tables;

    explicit Chain(const std::vector<std::tuple<int, int64_t, int64_t>> &shapes)
    {
        for (const auto &[shift, n_sets, ways] : shapes) {
            if (shift < 0 || shift > 62 || n_sets < 1 || ways < 1 || ways > CACHELAB_MAX_WAYS / n_sets)
                throw py::value_error("a table has 1 set or more of 1 way or more, 2^28 ways in all");
            tags.emplace_back((size_t)(n_sets * ways));
            tables.push_back({tags.back().data(), n_sets, ways, shift, 0, 0});
            cachelab_table_clear(&tables.back());
        }
    }
    Chain(const Chain &) = delete;
    Chain &operator=(const Chain &) = delete;

    void walk(const Addresses &addresses)
    {
        const int64_t *from = addresses.data(), n = addresses.size();
        for (int64_t i = 0; i < n; i++)
            if (from[i] < 0)
                throw py::value_error("addresses are 0 or more");
        py::gil_scoped_release free;
        cachelab_walk(tables.data(), (int64_t)tables.size(), from, n);
    }

    std::vector<std::pair<int64_t, int64_t>> counts() const
    {
        std::vector<std::pair<int64_t, int64_t>> out;
        for (const cachelab_table &t : tables)
            out.emplace_back(t.accesses, t.misses);
        return out;
    }
};

void bind_hierarchy(py::module_ &m)
{
    py::class_<Chain>(m, "Chain")
        .def(py::init<std::vector<std::tuple<int, int64_t, int64_t>>>())
        .def("walk", &Chain::walk)
        .def("counts", &Chain::counts);
}
