// bind_work.cpp: what the stages of a pass compute and touch.
#include <memory>
#include <optional>

#include "cachelab.hpp"

using Ids = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

struct Work {
    cachelab_sizes sizes;
    std::unique_ptr<cachelab_work, decltype(&cachelab_work_free)> handle;

    Work(int64_t n_layers, int64_t vocab, int64_t hidden, int64_t heads, int64_t key_heads, int64_t head_dim, int64_t n_experts,
         int64_t top_k, int64_t expert_width, int64_t shared_width, int64_t dense_width)
        : sizes{n_layers, vocab, hidden, heads, key_heads, head_dim, n_experts, top_k, expert_width, shared_width, dense_width},
          handle(cachelab_work_create(&sizes), &cachelab_work_free)
    {
        if (!handle)
            throw std::bad_alloc();
    }

    void layer(int64_t layer, bool is_moe, bool has_shared, int64_t window)
    {
        if (layer < 0 || layer >= sizes.n_layers)
            throw py::index_error("there is no such layer");
        cachelab_work_layer(handle.get(), layer, is_moe, has_shared, window);
    }

    void weight(const std::string &name, int64_t n_elements, int64_t n_bytes)
    {
        cachelab_work_weight(handle.get(), name.c_str(), n_elements, n_bytes);
    }

    // (layers + 1, stages, 2): operations and bytes.
    py::array_t<double> tile(int64_t start, int64_t n, bool last, const std::vector<std::optional<Ids>> &ids)
    {
        std::vector<const int32_t *> chosen((size_t)sizes.n_layers, nullptr);
        if (ids.size() != chosen.size())
            throw py::value_error("each layer has its ids, or None");
        for (size_t l = 0; l < ids.size(); l++) {
            if (!ids[l])
                continue;
            if (ids[l]->ndim() != 2 || ids[l]->shape(0) != n || ids[l]->shape(1) != sizes.top_k)
                throw py::value_error("ids have the shape (n, k)");
            for (py::ssize_t i = 0; i < ids[l]->size(); i++)
                if (ids[l]->data()[i] < -1 || ids[l]->data()[i] >= sizes.n_experts)
                    throw py::value_error("an id is -1 to " + std::to_string(sizes.n_experts - 1));
            chosen[l] = ids[l]->data();
        }
        py::array_t<double> out({(py::ssize_t)(sizes.n_layers + 1), (py::ssize_t)CACHELAB_STAGES, (py::ssize_t)2});
        std::fill(out.mutable_data(), out.mutable_data() + out.size(), 0.0);
        cachelab_work_tile(handle.get(), start, n, last, chosen.data(), reinterpret_cast<cachelab_amount *>(out.mutable_data()));
        return out;
    }
};

void bind_work(py::module_ &m)
{
    py::class_<Work>(m, "Work")
        .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(), py::kw_only(),
             py::arg("n_layers"), py::arg("vocab"), py::arg("hidden"), py::arg("heads"), py::arg("key_heads"), py::arg("head_dim"),
             py::arg("n_experts"), py::arg("top_k"), py::arg("expert_width"), py::arg("shared_width"), py::arg("dense_width"))
        .def("layer", &Work::layer, py::arg("layer"), py::arg("is_moe"), py::arg("has_shared"), py::arg("window"))
        .def("weight", &Work::weight, py::arg("name"), py::arg("n_elements"), py::arg("n_bytes"))
        .def("tile", &Work::tile, py::arg("start"), py::arg("n"), py::arg("last"), py::arg("ids"));
}
