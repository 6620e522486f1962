#include "foreign.h"

#include <string.h>

const char *foreign_kind(const unsigned char *data, int64_t n_bytes)
{
    static const struct {
        const char *start;
        size_t length;
        const char *kind;
    } known[] = {
        {"version https://git-lfs", 23, "a Git LFS pointer, not the file it stands for; fetch that with `git lfs pull`"},
        {"<!DOCTYPE", 9, "a web page, not a model file; the download went wrong"},
        {"<!doctype", 9, "a web page, not a model file; the download went wrong"},
        {"<html", 5, "a web page, not a model file; the download went wrong"},
        {"<HTML", 5, "a web page, not a model file; the download went wrong"},
        {"<?xml", 5, "an XML document, not a model file; the download went wrong"},
        {"PK\3\4", 4, "a zip archive, perhaps a PyTorch pickle; only safetensors are read"},
        {"GGUF", 4, "a GGUF file; only safetensors are read"},
        {"\x89HDF\r\n", 6, "an HDF5 file; only safetensors are read"},
        {"\x1F\x8B", 2, "a gzip archive; unpack it first"},
    };
    if (n_bytes == 0)
        return "empty";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (n_bytes >= (int64_t)known[i].length && memcmp(data, known[i].start, known[i].length) == 0)
            return known[i].kind;
    if (n_bytes >= 2 && data[0] == 0x80 && data[1] >= 2 && data[1] <= 5 && (n_bytes < 8 || data[7] != 0))
        return "a Python pickle; only safetensors are read"; /* the top byte of a header length is 0 in every real file */
    return NULL;
}
