// bind_model.cpp: a checkpoint. Its configuration and its weights are tables, bound by loops.
#include <algorithm>

#include "blocks.hpp"
#include "handles.hpp"
#include "view.hpp"

static std::unique_ptr<Model> open_model(const std::string &path)
{
    colibri_model *opened = nullptr;
    colibri_message message;
    check(colibri_model_open(path.c_str(), &opened, &message), message);
    auto model = std::make_unique<Model>();
    model->handle.reset(opened);
    return model;
}

static py::object field_value(const colibri_field &field)
{
    switch (field.kind) {
    case COLIBRI_FIELD_BOOLEAN: return py::bool_(field.integer != 0);
    case COLIBRI_FIELD_INTEGER: return py::int_(field.integer);
    case COLIBRI_FIELD_REAL: return py::float_(field.real);
    case COLIBRI_FIELD_TEXT: return py::str(field.text);
    case COLIBRI_FIELD_NONE: break;
    }
    return py::none();
}

static py::dict fields(const Model &model)
{
    py::dict out;
    for (size_t i = 0; i < colibri_model_field_count(model.get()); i++) {
        colibri_field field = colibri_model_field(model.get(), i);
        out[field.name] = field_value(field);
    }
    return out;
}

static py::tuple layer(const Model &model, int64_t index)
{
    colibri_layer_info info = colibri_model_layer(model.get(), index);
    return py::make_tuple(info.is_moe, info.has_shared_expert, info.window);
}

// A name on disk is bytes; Python's own text for them goes back to the same bytes.
static py::object path_text(const char *path)
{
    py::object text = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(path));
    if (!text)
        throw py::error_already_set();
    return text;
}

static py::tuple weights(const Model &model)
{
    py::object make = py::module_::import("collections").attr("namedtuple")("Weight", "name shape dtype tensor file file_offset aligned replaced");
    py::tuple out(colibri_model_weight_count(model.get()));
    for (size_t i = 0; i < out.size(); i++) {
        colibri_weight weight = colibri_model_weight(model.get(), i);
        py::tuple shape(weight.array.n_dims);
        for (int d = 0; d < weight.array.n_dims; d++)
            shape[d] = weight.array.shape[d];
        out[i] = make(weight.name, shape, numpy_dtype(weight.array.dtype), weight.tensor, path_text(weight.file), weight.file_offset, is_aligned(weight.array), weight.replaced);
    }
    return out;
}

static std::vector<std::string> unused(const Model &model)
{
    std::vector<std::string> names(colibri_model_unused_count(model.get()));
    for (size_t i = 0; i < names.size(); i++)
        names[i] = colibri_model_unused(model.get(), i);
    return names;
}

static colibri_weight weight_at(const Model &model, size_t index)
{
    if (index >= colibri_model_weight_count(model.get()))
        throw py::index_error("the model has " + std::to_string(colibri_model_weight_count(model.get())) + " weights");
    return colibri_model_weight(model.get(), index);
}

static void check_files(const Model &model)
{
    colibri_message message;
    check(colibri_model_check_files(model.get(), &message), message);
}

static py::array weight_view(const Model &model, size_t index)
{
    colibri_array array = weight_at(model, index).array;
    check_files(model);
    return is_aligned(array) ? view(array, new_lease(colibri_model_lease(model.get()))) : aligned_copy(array);
}

static py::array weight_float32(const Model &model, size_t index)
{
    colibri_array array = weight_at(model, index).array;
    py::array_t<float> out(std::vector<py::ssize_t>(array.shape, array.shape + array.n_dims));
    colibri_message message;
    check(colibri_array_widen(&array, out.mutable_data(), &message), message);
    check_files(model); // a page lost while it was read
    return out;
}

static void replace_weight(const Model &model, size_t index, const py::array &values)
{
    colibri_weight weight = weight_at(model, index);
    py::array rows = py::array::ensure(values, py::array::c_style); // bits are kept
    colibri_array array = describe(rows, engine_dtype(rows.dtype(), ("weight " + std::string(weight.name) + " cannot be replaced by").c_str()));
    colibri_message message;
    check(colibri_model_replace(model.get(), index, &array, &message), message);
}

static py::tuple weight_census(const Model &model, size_t index)
{
    colibri_array array = weight_at(model, index).array;
    colibri_census counts;
    colibri_message message;
    check(colibri_array_census(&array, &counts, &message), message);
    check_files(model);
    return py::make_tuple(counts.n_nan, counts.n_inf, counts.n_subnormal, counts.first_nonfinite);
}

static py::tuple files(const Model &model)
{
    py::tuple out(colibri_model_file_count(model.get()));
    for (size_t i = 0; i < out.size(); i++) {
        colibri_file file = colibri_model_file(model.get(), i);
        out[i] = py::make_tuple(path_text(file.path), (uintptr_t)file.data, file.n_bytes);
    }
    return out;
}

// Blocks come and go on other threads between the two calls: a few more are asked for than were there.
static py::tuple blocks(const Model &model)
{
    std::vector<colibri_block> found(colibri_model_blocks(model.get(), nullptr, 0) + 16);
    size_t count = colibri_model_blocks(model.get(), found.data(), found.size());
    return describe_blocks(found.data(), std::min(count, found.size()));
}

void bind_model(py::module_ &m)
{
    py::class_<Model>(m, "Model")
        .def(py::init(&open_model), py::arg("path"))
        .def("close", [](Model &model) { model.handle.reset(); })
        .def_property_readonly("closed", [](const Model &model) { return !model.handle; })
        .def("users", [](const Model &model) { return colibri_model_users(model.get()); }, "Sessions and leases alive.")
        .def("check_files", &check_files, "Raises FileError when a mapped file has changed.")
        .def("fields", &fields)
        .def("layer", &layer, py::arg("index"), "(is_moe, has_shared_expert, window).")
        .def("weights", &weights)
        .def("files", &files, "(path, address, bytes) of each mapped file.")
        .def("blocks", &blocks, "Every block of a session of this model that is alive.")
        .def("unused", &unused, "Names of the tensors in the files that no computation uses.")
        .def("weight", &weight_view, py::arg("index"))
        .def("float32", &weight_float32, py::arg("index"))
        .def("replace", &replace_weight, py::arg("index"), py::arg("values"))
        .def("census", &weight_census, py::arg("index"));
}
