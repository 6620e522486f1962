/* The JSON reader: values are exact, and every broken text is refused with its place. */
#include "check.h"
#include "model/json.h"

static colibri_message message;

static colibri_status parse(const char *text, json *out)
{
    return json_parse(text, strlen(text), "file.json", out, &message);
}

static void refused(const char *text, const char *piece)
{
    json document;
    CHECK(parse(text, &document) == COLIBRI_ERROR_FORMAT);
    CHECK_MESSAGE_HAS(message, "file.json");
    CHECK_MESSAGE_HAS(message, piece);
    CHECK(document.nodes == NULL && document.strings == NULL);
}

static json_node value_of(const char *text)
{
    json document;
    CHECK_OK(parse(text, &document), message);
    json_node root = document.nodes[0];
    json_free(&document);
    return root;
}

static bool text_is(const char *json_text, const char *wanted)
{
    json document;
    CHECK_OK(parse(json_text, &document), message);
    bool same = document.nodes->kind == JSON_STRING && strcmp(document.nodes->as.text, wanted) == 0;
    json_free(&document);
    return same;
}

static void test_integers_are_exact_within_int64_and_real_beyond(void)
{
    CHECK(value_of("0").as.integer == 0 && value_of("-0").as.integer == 0);
    CHECK(value_of("9223372036854775807").as.integer == INT64_MAX);
    CHECK(value_of("-9223372036854775808").as.integer == INT64_MIN);
    CHECK(value_of("9007199254740993").as.integer == 9007199254740993);
    CHECK(value_of("9223372036854775808").kind == JSON_REAL && value_of("9223372036854775808").as.real == 9223372036854775808.0);
    CHECK(value_of("18446744073709551616").kind == JSON_REAL);
    CHECK(value_of("4.0").kind == JSON_REAL && value_of("1e3").kind == JSON_REAL);
}

static void test_reals_are_the_nearest_float64(void)
{
    CHECK(value_of("1e-06").as.real == 1e-06);
    CHECK(value_of("0.30000000000000004").as.real == 0.30000000000000004);
    CHECK(value_of("123456.789E-3").as.real == 123.456789);
    CHECK(value_of("-2.5e+2").as.real == -250.0);
    CHECK(value_of("1.7976931348623157e308").as.real == 1.7976931348623157e308);
    CHECK(value_of("1e-400").as.real == 0.0);
    CHECK(value_of("10000000000000000000000000000000000000000.0e-40").as.real == 1.0);
    CHECK(value_of("0.00000000000000000000000000000000000000001e41").as.real == 1.0);
}

static void test_what_is_no_number_is_refused(void)
{
    static const char *const texts[] = {"01",   "+1",  "1.",       ".5",        "-",     "1e",  "1e+",
                                        "0x10", "NaN", "Infinity", "-Infinity", "1.2.3", "--1", "1_0"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        refused(texts[i], "line 1, column");
    refused("1e999", "beyond float64");
    refused("-1e999", "beyond float64");
    static char digits[1000];
    memset(digits, '7', 900);
    refused(digits, "799 digits");
}

static void test_strings_are_unescaped_and_must_be_utf8(void)
{
    CHECK(text_is("\"a\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "a\"\\/\b\f\n\r\t"));
    CHECK(text_is("\"\\u0041\\u00e9\\u20AC\\uD83D\\uDE00\"", "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"));
    CHECK(text_is("\"\xC3\xA9\xF4\x8F\xBF\xBF\"", "\xC3\xA9\xF4\x8F\xBF\xBF"));
    refused("\"\\uD83D\"", "surrogate");
    refused("\"\\uD83Dx\"", "surrogate");
    refused("\"\\uD83D\\u0041\"", "surrogate");
    refused("\"\\uDE00\"", "surrogate");
    refused("\"\\u00g0\"", "escape");
    refused("\"\\u00", "escape");
    refused("\"\\x41\"", "escape");
    refused("\"\\u0000\"", "U+0000");
    refused("\"a\nb\"", "control character");
    refused("\"abc", "without an end");
    static const char *const broken[] = {"\"\x80\"",         "\"\xC0\xAF\"",         "\"\xE0\x80\x80\"",
                                         "\"\xED\xA0\x80\"", "\"\xF4\x90\x80\x80\"", "\"\xF8\x88\x80\x80\x80\"",
                                         "\"\xC3\"",         "\"\xE2\x82\"",         "\"\xFF\""};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++)
        refused(broken[i], "UTF-8");
}

static void test_structure_is_strict_and_the_place_is_named(void)
{
    refused("", "no JSON");
    refused("{\"a\":1,}", "column 8");
    refused("[1,]", "not a JSON value");
    refused("[1 2]", "',' or ']'");
    refused("{\"a\" 1}", "':'");
    refused("{a:1}", "key in quotes");
    refused("{\"a\":1} x", "more text");
    refused("{\n  \"a\": tru\n}", "line 2, column 8");
    refused("[1", "',' or ']'");
    refused("\xEF\xBB\xBF{}", "byte order mark (BOM)");
    refused("\xEF\xBB", "not a JSON value");
    refused("nul", "not a JSON value");
    refused("// c\n{}", "not a JSON value");
}

static void test_deep_nesting_is_refused_without_recursion(void)
{
    enum { FAR = 1000000 };
    static char text[FAR + 1];
    memset(text, '[', FAR);
    refused(text, "too deeply");
    for (int i = 0; i < FAR / 5; i++)
        memcpy(text + 5 * i, "{\"a\":", 5);
    refused(text, "too deeply");

    char fits[2 * COLIBRI_MAX_JSON_DEPTH + 1] = "";
    memset(fits, '[', COLIBRI_MAX_JSON_DEPTH);
    memset(fits + COLIBRI_MAX_JSON_DEPTH, ']', COLIBRI_MAX_JSON_DEPTH);
    CHECK(value_of(fits).kind == JSON_ARRAY);
}

static void test_a_key_may_occur_once_also_after_unescaping(void)
{
    refused("{\"a\":1,\"b\":2,\"a\":3}", "\"a\" occurs twice");
    refused("{\"ab\":1,\"a\\u0062\":2}", "\"ab\" occurs twice");
    refused("{\"x\":{\"k\":1,\"k\":1}}", "\"k\" occurs twice");
    refused("[{\"1\":0,\"2\":0,\"3\":0,\"4\":0,\"5\":0,\"6\":0,\"7\":0,\"8\":0,\"9\":0,\"3\":0}]", "\"3\" occurs twice");
    CHECK(value_of("{\"a\":{\"a\":1},\"b\":{\"a\":1}}").as.count == 2);
}

static void test_members_and_elements_are_walked_in_order(void)
{
    json document;
    CHECK_OK(parse(" { \"a\" : [ 1 , { } , [ ] , \"x\" ] , \"b\" : true , \"c\" : null , \"d\" : false } ", &document), message);
    const json_node *root = document.nodes, *list = json_member(root, "a"), *item = json_first(list);
    CHECK(root->as.count == 4 && list->as.count == 4);
    CHECK(item->as.integer == 1);
    item = json_next(list, item);
    CHECK(item->kind == JSON_OBJECT && item->as.count == 0 && json_first(item) == NULL);
    item = json_next(list, json_next(list, item));
    CHECK(strcmp(item->as.text, "x") == 0 && json_next(list, item) == NULL);
    CHECK(json_member(root, "b")->kind == JSON_TRUE && json_member(root, "c")->kind == JSON_NULL &&
          json_member(root, "d")->kind == JSON_FALSE);
    CHECK(json_member(root, "e") == NULL && json_member(list, "a") == NULL && json_member(NULL, "a") == NULL);
    json_free(&document);
}

static void test_a_hundred_thousand_keys_take_no_quadratic_time(void)
{
    enum { KEYS = 100000 };
    char *text = malloc(KEYS * 16 + 16);
    CHECK(text != NULL);
    size_t n = (size_t)sprintf(text, "{");
    for (int i = 0; i < KEYS; i++)
        n += (size_t)sprintf(text + n, "%s\"k%d\":%d", i == 0 ? "" : ",", i, i);
    sprintf(text + n, "}");
    CHECK(value_of(text).as.count == KEYS); /* pairs would be 5 * 10^9 comparisons: the test would not end */
    free(text);
}

int main(void)
{
    RUN(test_integers_are_exact_within_int64_and_real_beyond);
    RUN(test_reals_are_the_nearest_float64);
    RUN(test_what_is_no_number_is_refused);
    RUN(test_strings_are_unescaped_and_must_be_utf8);
    RUN(test_structure_is_strict_and_the_place_is_named);
    RUN(test_deep_nesting_is_refused_without_recursion);
    RUN(test_a_key_may_occur_once_also_after_unescaping);
    RUN(test_members_and_elements_are_walked_in_order);
    RUN(test_a_hundred_thousand_keys_take_no_quadratic_time);
    return 0;
}
