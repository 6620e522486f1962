/* From a path to files and one table: folders, single files, indices, and what is missing from them. */
#include "check.h"
#include "model/checkpoint.h"
#include "support/model_files.h"

#include <sys/stat.h>
#include <unistd.h>

static colibri_message message;
static folder place;
static checkpoint *c;

static void write_pair(void) /* tensors a, b in one.safetensors; c in two.safetensors */
{
    shelf s = {NULL, 0, 0};
    shelf_add(&s, "a", 2, 0, 0, 10);
    shelf_add(&s, "b", 3, 0, 0, 20);
    shelf_add(&s, "c", 1, 0, 0, 30);
    shelf_write_some(&s, folder_file(&place, "one.safetensors"), 0, 2);
    shelf_write_some(&s, folder_file(&place, "two.safetensors"), 2, 3);
    shelf_free(&s);
}

static void write_index(const char *map)
{
    char text[2048];
    snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":24},\"weight_map\":%s}", map);
    file_write_text(folder_file(&place, "model.safetensors.index.json"), text);
}

static const char good_map[] = "{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\",\"b\":\"one.safetensors\"}";

static void refused(colibri_status status, const char *piece)
{
    CHECK(checkpoint_open(place.path, &c, &message) == status);
    CHECK(c == NULL);
    CHECK_MESSAGE_HAS(message, piece);
}

static void start(void)
{
    place = folder_make();
    write_pair();
}

static float first_value(const char *name)
{
    float value;
    const tensor *t = checkpoint_find(c, name);
    CHECK(t != NULL);
    memcpy(&value, t->data, sizeof value);
    return value;
}

static void test_an_index_joins_its_shards_into_one_table(void)
{
    start();
    write_index(good_map);
    CHECK_OK(checkpoint_open(place.path, &c, &message), message);
    CHECK(c->n_files == 2 && c->n_tensors == 3);
    CHECK(first_value("a") == 10 && first_value("b") == 20 && first_value("c") == 30);
    CHECK(strstr(checkpoint_file_path(c, checkpoint_find(c, "c")), "two.safetensors") != NULL);
    CHECK(checkpoint_find(c, "d") == NULL && checkpoint_find(c, "") == NULL);
    CHECK_OK(checkpoint_check(c, &message), message);
    checkpoint_free(c);

    CHECK_OK(checkpoint_open(folder_file(&place, "model.safetensors.index.json"), &c, &message),
             message); /* by the index' own path */
    CHECK(c->n_tensors == 3);
    checkpoint_free(c);
    CHECK_OK(checkpoint_open(folder_file(&place, "one.safetensors"), &c, &message), message); /* by one file */
    CHECK(c->n_tensors == 2);
    checkpoint_free(c);

    file_write_text(folder_file(&place, "model.safetensors.index.json"), "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"one."
                                                                         "safetensors\"}}");
    CHECK_OK(checkpoint_open(place.path, &c, &message), message); /* metadata and total_size are optional */
    checkpoint_free(c);
    folder_remove(&place);
}

static void test_a_single_file_comes_before_an_index(void)
{
    start();
    write_index(good_map);
    shelf s = {NULL, 0, 0};
    shelf_add(&s, "single", 1, 0, 0, 40);
    shelf_write(&s, folder_file(&place, "model.safetensors"));
    shelf_free(&s);
    CHECK_OK(checkpoint_open(place.path, &c, &message), message);
    CHECK(c->n_tensors == 1 && first_value("single") == 40);
    checkpoint_free(c);
    folder_remove(&place);
}

static void test_C4_missing_shards_and_tensors_are_all_listed(void)
{
    start();
    write_index("{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\",\"c\":\"two.safetensors\",\"d\":\"three.safetensors\","
                "\"e\":\"four.safetensors\"}");
    remove(folder_file(&place, "two.safetensors"));
    refused(COLIBRI_ERROR_FILE, "3 of them are missing");
    CHECK_MESSAGE_HAS(message, "two.safetensors");
    CHECK_MESSAGE_HAS(message, "three.safetensors");
    CHECK_MESSAGE_HAS(message, "four.safetensors");

    write_pair();
    write_index("{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\",\"c\":\"two.safetensors\",\"x\":\"two.safetensors\",\"y\":"
                "\"one.safetensors\"}");
    refused(COLIBRI_ERROR_FORMAT, "2 of them are not in their files");
    CHECK_MESSAGE_HAS(message, "\"x\"");
    CHECK_MESSAGE_HAS(message, "\"y\"");
    folder_remove(&place);
}

static void test_C4_a_folder_without_weights_says_what_it_has_instead(void)
{
    place = folder_make();
    refused(COLIBRI_ERROR_FILE, "no weights");
    file_write_text(folder_file(&place, "pytorch_model.bin"), "x");
    refused(COLIBRI_ERROR_UNSUPPORTED, "pytorch_model.bin");
    remove(folder_file(&place, "pytorch_model.bin"));
    file_write_text(folder_file(&place, "model-q4.gguf"), "x");
    refused(COLIBRI_ERROR_UNSUPPORTED, "GGUF");
    file_write_text(folder_file(&place, "weights.safetensors"), "x");
    refused(COLIBRI_ERROR_FILE, "open that file by its path");
    folder_remove(&place);
}

static void test_an_index_that_omits_or_misplaces_a_tensor_is_refused(void)
{
    start();
    write_index("{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\"}");
    refused(COLIBRI_ERROR_FORMAT, "\"b\", which");
    write_index("{\"a\":\"two.safetensors\",\"b\":\"one.safetensors\",\"c\":\"two.safetensors\"}");
    refused(COLIBRI_ERROR_FORMAT, "places tensor \"a\" in two.safetensors");
    shelf s = {NULL, 0, 0};
    shelf_add(&s, "a", 2, 0, 0, 0);
    shelf_write(&s, folder_file(&place, "two.safetensors"));
    shelf_free(&s);
    write_index("{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\",\"a2\":\"two.safetensors\"}");
    refused(COLIBRI_ERROR_FORMAT, "both in");
    folder_remove(&place);
}

static void test_an_index_is_an_object_that_names_files(void)
{
    start();
    write_index("{}");
    refused(COLIBRI_ERROR_FORMAT, "weight_map");
    write_index("[]");
    refused(COLIBRI_ERROR_FORMAT, "weight_map");
    write_index("{\"a\":1}");
    refused(COLIBRI_ERROR_FORMAT, "\"a\" must be a string");
    write_index("{\"a\":\"one.safetensors\",\"a\":\"two.safetensors\"}");
    refused(COLIBRI_ERROR_FORMAT, "\"a\" occurs twice");
    static const char *const texts[] = {"[]", "", "{\"weight_map\":", "version https://git-lfs.github.com/spec/v1\n", "<html>"};
    static const char *const pieces[] = {"weight_map", "empty", "too early", "Git LFS", "web page"};
    for (int i = 0; i < 5; i++) {
        file_write_text(folder_file(&place, "model.safetensors.index.json"), texts[i]);
        refused(COLIBRI_ERROR_FORMAT, pieces[i]);
    }
    folder_remove(&place);
}

static void test_shard_names_stay_in_the_folder(void)
{
    start();
    static const char *const names[] = {"../one.safetensors", "/etc/passwd",       "a/../../one.safetensors", "..", ".", "",
                                        "a//one.safetensors", "./one.safetensors", "..\\\\one.safetensors",   "a/"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char map[200];
        snprintf(map, sizeof map, "{\"a\":\"%s\"}", names[i]);
        write_index(map);
        refused(COLIBRI_ERROR_FORMAT, "leaves the folder");
    }
    CHECK(symlink(folder_file(&place, "one.safetensors"), folder_file(&place, "link.safetensors")) == 0);
    write_index("{\"a\":\"link.safetensors\",\"b\":\"link.safetensors\"}");
    CHECK_OK(checkpoint_open(place.path, &c, &message), message); /* download caches are made of links */
    checkpoint_free(c);
    folder_remove(&place);
}

static void test_pipes_and_folders_are_no_weights_and_do_not_block(void)
{
    start();
    CHECK(mkfifo(folder_file(&place, "pipe.safetensors"), 0600) == 0);
    write_index("{\"a\":\"pipe.safetensors\"}");
    refused(COLIBRI_ERROR_FILE, "a pipe");
    CHECK(mkdir(folder_file(&place, "model.safetensors"), 0700) == 0);
    refused(COLIBRI_ERROR_FILE, "a folder");
    folder_remove(&place);
    CHECK(checkpoint_open("/dev/null", &c, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "a device");
}

static void test_the_folder_of_a_path_is_what_contains_it(void)
{
    place = folder_make();
    char *a = checkpoint_folder(place.path), *b = checkpoint_folder(a), *f = checkpoint_folder("somewhere/model.safetensors"),
         *here = checkpoint_folder("model.safetensors");
    CHECK(a[strlen(a) - 1] == '/' && strcmp(a, b) == 0);
    CHECK(strcmp(f, "somewhere/") == 0 && strcmp(here, "./") == 0);
    free(a);
    free(b);
    free(f);
    free(here);
    folder_remove(&place);
}

int main(void)
{
    RUN(test_an_index_joins_its_shards_into_one_table);
    RUN(test_a_single_file_comes_before_an_index);
    RUN(test_C4_missing_shards_and_tensors_are_all_listed);
    RUN(test_C4_a_folder_without_weights_says_what_it_has_instead);
    RUN(test_an_index_that_omits_or_misplaces_a_tensor_is_refused);
    RUN(test_an_index_is_an_object_that_names_files);
    RUN(test_shard_names_stay_in_the_folder);
    RUN(test_pipes_and_folders_are_no_weights_and_do_not_block);
    RUN(test_the_folder_of_a_path_is_what_contains_it);
    return 0;
}
