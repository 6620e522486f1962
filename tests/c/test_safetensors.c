/* The safetensors header: every row of the byte table, each refusal naming the fault. f = 00 00 C0 3F is 1.5. */
#include "check.h"
#include "model/safetensors.h"
#include "support/model_files.h"

static const unsigned char f[16] = {0, 0, 0xC0, 0x3F, 0, 0, 0xC0, 0x3F, 0, 0, 0xC0, 0x3F, 0, 0, 0xC0, 0x3F};

static colibri_message message;
static folder place;
static mapfile file;
static safetensors table;

static colibri_status read_back(void)
{
    CHECK_OK(mapfile_open(folder_file(&place, "t.safetensors"), &file, &message), message);
    return safetensors_read(&file, &table, &message);
}

static void close_both(void)
{
    safetensors_free(&table);
    mapfile_close(&file);
}

static void refused_file(const void *bytes, size_t n_bytes, const char *piece)
{
    file_write(folder_file(&place, "t.safetensors"), bytes, n_bytes);
    CHECK(read_back() == COLIBRI_ERROR_FORMAT);
    CHECK_MESSAGE_HAS(message, piece);
    CHECK_MESSAGE_HAS(message, "t.safetensors");
    CHECK(table.tensors == NULL);
    close_both();
}

static void refused(const char *header, int64_t claimed, size_t n_data, const char *piece)
{
    raw_safetensors_write(folder_file(&place, "t.safetensors"), header, claimed, f, n_data);
    CHECK(read_back() == COLIBRI_ERROR_FORMAT);
    CHECK_MESSAGE_HAS(message, piece);
    CHECK_MESSAGE_HAS(message, "t.safetensors");
    close_both();
}

/* Leaves the table open: close_both after. */
static void accepted(const char *header, size_t n_data)
{
    raw_safetensors_write(folder_file(&place, "t.safetensors"), header, -1, f, n_data);
    CHECK_OK(read_back(), message);
}

static const tensor *named(const char *name)
{
    for (int64_t i = 0; i < table.n_tensors; i++)
        if (strcmp(table.tensors[i].name, name) == 0)
            return &table.tensors[i];
    CHECK(!"no such tensor");
    return NULL;
}

static float value(const tensor *t)
{
    float out;
    memcpy(&out, t->data, sizeof out);
    return out;
}

#define T(name, shape, begin, end) "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static void test_C1_a_file_that_is_something_else_is_named_for_what_it_is(void)
{
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid "
                              "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    static const char html[] = "<!DOCTYPE html><html><body>404</body></html>";
    refused_file(lfs, sizeof lfs - 1, "Git LFS pointer");
    refused_file(html, sizeof html - 1, "web page");
    refused_file("<html>", 6, "web page");
    refused_file("", 0, "empty");
    refused_file("\x01\x00\x00\x00\x00\x00\x00", 7, "7 bytes");
    refused_file("PK\x03\x04........", 12, "zip archive");
    refused_file("GGUF........", 12, "GGUF");
    refused_file("\x80\x02}q\x00X\x05\x00\x00", 9, "too large"); /* a pickle with a zero in byte 7: at least no tensor file */
    refused_file("\x80\x02}q\x00X\x05q\x00", 9, "pickle");
}

static void test_a_header_length_is_believed_only_when_the_bytes_are_there(void)
{
    refused("", 0, 0, "length 0");
    refused("{}", 50, 0, "claims 50 bytes");
    refused("{}", 100000001, 0, "too large");
    refused("{}", -2, 0, "too large"); /* 2^64 - 2 */
    refused("{}", INT64_MAX, 0, "too large");
    refused("{}", 100000000, 0, "claims 100000000 bytes"); /* no allocation of that size: the file has 10 */
}

static void test_C2_tensors_cover_the_data_without_overlap_or_hole(void)
{
    refused("{" T("a", "[1]", 0, 4) "," T("b", "[1]", 0, 4) "}", -1, 4, "same bytes");
    CHECK_MESSAGE_HAS(message, "\"a\"");
    CHECK_MESSAGE_HAS(message, "\"b\"");
    refused("{" T("a", "[2]", 0, 8) "," T("b", "[2]", 4, 12) "}", -1, 12, "same bytes");
    refused("{" T("a", "[1]", 0, 4) "," T("b", "[1]", 8, 12) "}", -1, 12, "hole of 4 bytes");
    refused("{" T("a", "[1]", 4, 8) "}", -1, 8, "hole of 4 bytes");
    refused("{" T("a", "[1]", 0, 4) "}", -1, 5, "1 bytes after the last tensor");
    refused("{" T("a", "[2]", 0, 8) "}", -1, 4, "behind the end");
    refused("{}", -1, 4, "belong to none");
}

static void test_C3_shape_products_are_checked_at_each_step(void)
{
    refused("{" T("a", "[4294967296,4294967296]", 0, 0) "}", -1, 0, "overflows");
    refused("{" T("a", "[4611686018427387905]", 0, 4) "}", -1, 4, "overflows");
    refused("{" T("a", "[9223372036854775810,2]", 0, 16) "}", -1, 16, "shape");
    refused("{" T("a", "[9223372036854775807]", 0, 4) "}", -1, 4, "overflows");
    refused("{" T("a", "[0,4294967296,4294967296]", 0, 0) "}", -1, 0, "overflows");
    refused("{" T("a", "[-1]", 0, 4) "}", -1, 4, "shape");
    refused("{" T("a", "[1.5]", 0, 4) "}", -1, 4, "shape");
    refused("{" T("a", "[\"1\"]", 0, 4) "}", -1, 4, "shape");
    refused("{" T("a", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", -1, 4, "8 dimensions");
    refused("{" T("a", "[3]", 0, 4) "}", -1, 4, "needs 12 bytes");
    refused("{" T("a", "[1]", 0, 0) "}", -1, 0, "needs 4 bytes");
    refused("{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", -1, 1, "inside a byte");
}

static void test_offsets_are_two_ascending_integers(void)
{
    refused("{" T("a", "[1]", 4, 0) "}", -1, 4, "ascending");
    refused("{" T("a", "[1]", -4, 0) "}", -1, 4, "ascending");
    refused("{" T("a", "[1]", 0.0, 4) "}", -1, 4, "two integers");
    refused("{" T("a", "[1]", 18446744073709551615, 4) "}", -1, 4, "two integers");
    refused("{" T("a", "[1]", 9223372036854775803, 9223372036854775807) "}", -1, 4, "hole");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", -1, 4, "two integers");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[[0],4]}}", -1, 4, "two integers");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", -1, 4, "data_offsets");
}

static void test_an_entry_needs_dtype_shape_and_offsets(void)
{
    refused("{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "\"F33\" is not a safetensors dtype");
    refused("{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "dtype");
    refused("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "dtype");
    refused("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", -1, 4, "shape");
    refused("{\"a\":[1]}", -1, 4, "must be an object");
    refused("{\"a\":null}", -1, 4, "must be an object");
}

static void test_a_header_is_an_object_and_strict_json(void)
{
    refused("[]", -1, 0, "'{'");
    refused(" {}", -1, 0, "'{'");
    refused("{\"a\":", -1, 0, "too early");
    refused("{} x", -1, 0, "more text");
    refused("{" T("a", "[1]", 0, 4) "," T("a", "[1]", 4, 8) "}", -1, 8, "\"a\" occurs twice");
    refused("{" T("ab", "[1]", 0, 4) "," T("a\\u0062", "[1]", 4, 8) "}", -1, 8, "\"ab\" occurs twice");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "\"shape\" occurs twice");
}

static void test_metadata_is_an_object_of_strings_or_nothing(void)
{
    refused("{\"__metadata__\":{\"n\":1}}", -1, 0, "\"n\" must be a string");
    refused("{\"__metadata__\":{\"n\":null}}", -1, 0, "\"n\" must be a string");
    refused("{\"__metadata__\":{\"n\":{}}}", -1, 0, "\"n\" must be a string");
    refused("{\"__metadata__\":[]}", -1, 0, "object of strings");
    refused("{\"__metadata__\":\"x\"}", -1, 0, "object of strings");
    refused("{\"__metadata__\":{\"a\":\"1\",\"a\":\"1\"}}", -1, 0, "\"a\" occurs twice");
    static const char *const fine[] = {"{}", "{\"__metadata__\":null}", "{\"__metadata__\":{}}",
                                       "{\"__metadata__\":{\"format\":\"pt\"}}"};
    for (int i = 0; i < 4; i++) {
        accepted(fine[i], 0);
        CHECK(table.n_tensors == 0);
        close_both();
    }
}

static void test_what_the_reference_reader_accepts_is_accepted(void)
{
    accepted("{" T("empty", "[0,4]", 0, 0) "," T("b", "[1]", 0, 4) "}", 4);
    CHECK(named("empty")->n_bytes == 0 && named("empty")->n_dims == 2 && value(named("b")) == 1.5f);
    close_both();
    accepted("{" T("b", "[1]", 0, 4) "," T("empty", "[0,4]", 4, 4) "}", 4);
    CHECK(named("empty")->n_bytes == 0);
    close_both();
    accepted("{" T("scalar", "[]", 0, 4) "}", 4);
    CHECK(named("scalar")->n_dims == 0 && named("scalar")->n_bytes == 4);
    close_both();
    accepted("{" T("a", "[1]", 0, 4) "}     ", 4);
    close_both();
    accepted("{" T("z", "[1]", 4, 8) "," T("a", "[1]", 0, 4) "}", 8);
    CHECK(named("z")->file_offset == named("a")->file_offset + 4);
    close_both();
    accepted("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"note\":{\"x\":[1]}}}", 4);
    close_both();
}

static void test_C6_an_odd_offset_reads_the_right_value(void)
{
    static const unsigned char data[] = {7, 0, 0, 0xC0, 0x3F};
    raw_safetensors_write(folder_file(&place, "t.safetensors"),
                          "{\"u\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}," T("x", "[1]", 1, 5) "}", -1, data,
                          sizeof data);
    CHECK_OK(read_back(), message);
    CHECK(value(named("x")) == 1.5f && named("x")->n_dims == 1 && named("x")->shape[0] == 1);
    close_both();
    /* Without padding the data begins anywhere: four name lengths give every address modulo 4. */
    static const char *const names[] = {"a", "ab", "abc", "abcd"};
    int n_unaligned = 0;
    for (int i = 0; i < 4; i++) {
        char header[100];
        snprintf(header, sizeof header, "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", names[i]);
        accepted(header, 4);
        n_unaligned += (uintptr_t)named(names[i])->data % 4 != 0;
        CHECK(value(named(names[i])) == 1.5f);
        close_both();
    }
    CHECK(n_unaligned == 3);
}

static void test_every_dtype_of_the_format_is_known(void)
{
    static const struct { const char *name; int bits;
    } dtypes[] = {{"BOOL", 8}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
                  {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32},    {"U32", 32},    {"F32", 32},    {"F64", 64},
                  {"I64", 64}, {"U64", 64}, {"C64", 64},  {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        char header[200];
        int n = dtypes[i].bits == 4 ? 2 : dtypes[i].bits == 6 ? 4 : 1;
        snprintf(header, sizeof header, "{\"a\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", dtypes[i].name, n,
                 n * dtypes[i].bits / 8);
        accepted(header, (size_t)(n * dtypes[i].bits / 8));
        close_both();
    }
}

int main(void)
{
    place = folder_make();
    RUN(test_C1_a_file_that_is_something_else_is_named_for_what_it_is);
    RUN(test_a_header_length_is_believed_only_when_the_bytes_are_there);
    RUN(test_C2_tensors_cover_the_data_without_overlap_or_hole);
    RUN(test_C3_shape_products_are_checked_at_each_step);
    RUN(test_offsets_are_two_ascending_integers);
    RUN(test_an_entry_needs_dtype_shape_and_offsets);
    RUN(test_a_header_is_an_object_and_strict_json);
    RUN(test_metadata_is_an_object_of_strings_or_nothing);
    RUN(test_what_the_reference_reader_accepts_is_accepted);
    RUN(test_C6_an_odd_offset_reads_the_right_value);
    RUN(test_every_dtype_of_the_format_is_known);
    folder_remove(&place);
    return 0;
}
