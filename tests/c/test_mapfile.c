/* Mapped files: what opens, what is refused by its kind, and what counts as changed. */
#include "check.h"
#include "support/model_files.h"
#include "utils/mapfile.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static colibri_message message;

static void test_a_file_shows_its_bytes_and_an_empty_one_opens(void)
{
    folder place = folder_make();
    mapfile file;
    file_write(folder_file(&place, "f"), "abc", 3);
    CHECK_OK(mapfile_open(folder_file(&place, "f"), &file, &message), message);
    CHECK(file.n_bytes == 3 && memcmp(file.data, "abc", 3) == 0);
    CHECK_OK(mapfile_check(&file, &message), message);
    mapfile_close(&file);
    file_write(folder_file(&place, "f"), "", 0);
    CHECK_OK(mapfile_open(folder_file(&place, "f"), &file, &message), message);
    CHECK(file.n_bytes == 0 && file.data == NULL);
    mapfile_close(&file);
    mapfile_close(&file); /* a zeroed mapfile is fine */
    folder_remove(&place);
}

static void test_what_is_no_regular_file_is_refused_without_blocking(void)
{
    folder place = folder_make();
    mapfile file;
    CHECK(mapfile_open(folder_file(&place, "absent"), &file, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "absent");
    CHECK(mapfile_open(place.path, &file, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "a folder");
    CHECK(mkfifo(folder_file(&place, "pipe"), 0600) == 0);
    CHECK(mapfile_open(folder_file(&place, "pipe"), &file, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "a pipe");
    CHECK(mapfile_open("/dev/zero", &file, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "a device");
    CHECK(path_look(folder_file(&place, "pipe")) == PATH_OTHER && path_look(place.path) == PATH_FOLDER);
    CHECK(path_look(folder_file(&place, "absent")) == PATH_MISSING);
    CHECK(symlink("absent", folder_file(&place, "link")) == 0 && path_look(folder_file(&place, "link")) == PATH_OTHER);
    CHECK(mapfile_open(folder_file(&place, "link"), &file, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "points to nothing");
    folder_remove(&place);
}

static void test_E1_a_file_cut_or_rewritten_under_its_mapping_is_noticed(void)
{
    folder place = folder_make();
    mapfile file;
    const char *path = folder_file(&place, "f");
    file_write(path, "0123456789", 10);
    CHECK_OK(mapfile_open(path, &file, &message), message);
    CHECK(truncate(path, 5) == 0);
    CHECK(mapfile_check(&file, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "had 10 bytes and now has 5");
    mapfile_close(&file);

    file_write(path, "0123456789", 10);
    struct timespec past[2] = {{1000, 0}, {1000, 0}};
    CHECK(utimensat(AT_FDCWD, path, past, 0) == 0);
    CHECK_OK(mapfile_open(path, &file, &message), message);
    file_write(path, "9876543210", 10); /* the same size */
    CHECK(mapfile_check(&file, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "written to");
    mapfile_close(&file);
    folder_remove(&place);
}

static void test_E1_a_file_replaced_by_rename_or_removed_keeps_its_old_bytes(void)
{
    folder place = folder_make();
    mapfile file;
    file_write(folder_file(&place, "f"), "old", 3);
    CHECK_OK(mapfile_open(folder_file(&place, "f"), &file, &message), message);
    file_write(folder_file(&place, "new"), "new!", 4);
    CHECK(rename(folder_file(&place, "new"), folder_file(&place, "f")) == 0);
    CHECK_OK(mapfile_check(&file, &message), message);
    CHECK(memcmp(file.data, "old", 3) == 0);
    CHECK(remove(folder_file(&place, "f")) == 0);
    CHECK_OK(mapfile_check(&file, &message), message);
    CHECK(memcmp(file.data, "old", 3) == 0);
    mapfile_close(&file);
    folder_remove(&place);
}

int main(void)
{
    RUN(test_a_file_shows_its_bytes_and_an_empty_one_opens);
    RUN(test_what_is_no_regular_file_is_refused_without_blocking);
    RUN(test_E1_a_file_cut_or_rewritten_under_its_mapping_is_noticed);
    RUN(test_E1_a_file_replaced_by_rename_or_removed_keeps_its_old_bytes);
    return 0;
}
