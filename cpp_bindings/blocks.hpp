// blocks.hpp: the engine's memory, described to Python. Addresses are for the system's table of mappings, not for reading.
#pragma once

#include "pybind.hpp"

inline py::tuple describe_blocks(const colibri_block *blocks, size_t count)
{
    static const char *const kinds[] = {"plain", "madvise", "hugetlb", "file"}; // by colibri_page_kind
    py::object make = py::module_::import("collections").attr("namedtuple")("Block", "address planned mapped pages page_bytes why");
    py::tuple out(count);
    for (size_t i = 0; i < count; i++) {
        const colibri_block &b = blocks[i];
        out[i] = make((uintptr_t)b.data, b.n_bytes, b.n_mapped, kinds[b.pages], b.page_bytes, b.why);
    }
    return out;
}
