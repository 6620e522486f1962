#include "mapfile.h"
#include "mapguard.h"
#include "pages.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int64_t mtime_ns(const struct stat *s)
{
#ifdef __APPLE__
    return (int64_t)s->st_mtimespec.tv_sec * 1000000000 + s->st_mtimespec.tv_nsec;
#else
    return (int64_t)s->st_mtim.tv_sec * 1000000000 + s->st_mtim.tv_nsec;
#endif
}

static const char *kind_name(mode_t mode)
{
    return S_ISDIR(mode) ? "a folder" : S_ISFIFO(mode) ? "a pipe" : S_ISSOCK(mode) ? "a socket" : "a device";
}

static colibri_status refuse(const char *path, int error, colibri_message *message)
{
    return fail(message, COLIBRI_ERROR_FILE, "%s: %s", path, strerror(error));
}

colibri_status mapfile_open(const char *path, mapfile *file, colibri_message *message)
{
    memset(file, 0, sizeof *file);
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* does not wait for the writer of a pipe */
    if (fd < 0) {
        int error = errno;
        if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) /* sockets and some devices do not open */
            return fail(message, COLIBRI_ERROR_FILE, "%s is %s, not a regular file", path, kind_name(info.st_mode));
        if (error == ENOENT && lstat(path, &info) == 0)
            return fail(message, COLIBRI_ERROR_FILE, "%s is a link that points to nothing", path);
        return refuse(path, error, message);
    }
    if (fstat(fd, &info) != 0) {
        int error = errno;
        close(fd);
        return refuse(path, error, message);
    }
    if (!S_ISREG(info.st_mode)) {
        close(fd);
        return fail(message, COLIBRI_ERROR_FILE, "%s is %s, not a regular file", path, kind_name(info.st_mode));
    }
    void *data = NULL;
    if (info.st_size > 0) {
        data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            int error = errno;
            close(fd);
            return fail(message, COLIBRI_ERROR_MEMORY, "%s: %lld bytes cannot be mapped: %s", path, (long long)info.st_size,
                        strerror(error));
        }
    }
    close(fd);
    size_t length = strlen(path) + 1;
    char *copy = malloc(length);
    if (copy == NULL) {
        if (data != NULL)
            pages_give_back(data, (size_t)info.st_size);
        return fail(message, COLIBRI_ERROR_MEMORY, "%s: no memory for its name", path);
    }
    memcpy(copy, path, length);
    colibri_status guarded = data != NULL ? mapguard_add(data, (int64_t)info.st_size, message) : COLIBRI_OK;
    if (guarded != COLIBRI_OK) {
        pages_give_back(data, (size_t)info.st_size);
        free(copy);
        return guarded;
    }
    *file = (mapfile){copy, data, (int64_t)info.st_size, mtime_ns(&info), (uint64_t)info.st_dev, (uint64_t)info.st_ino};
    return COLIBRI_OK;
}

void mapfile_close(mapfile *file)
{
    if (file->data != NULL) {
        mapguard_remove(file->data);
        pages_give_back((void *)(uintptr_t)file->data, (size_t)file->n_bytes);
    }
    free(file->path);
    memset(file, 0, sizeof *file);
}

colibri_status mapfile_check(const mapfile *file, colibri_message *message)
{
    struct stat info;
    if (file->data != NULL && mapguard_lost(file->data))
        return fail(message, COLIBRI_ERROR_FILE,
                    "%s changed while it was mapped: a part of it could not be read; open the model again", file->path);
    if (stat(file->path, &info) != 0 || (uint64_t)info.st_dev != file->device || (uint64_t)info.st_ino != file->inode)
        return COLIBRI_OK;
    if ((int64_t)info.st_size != file->n_bytes)
        return fail(message, COLIBRI_ERROR_FILE,
                    "%s changed while it was mapped: it had %lld bytes and now has %lld; open the model again", file->path,
                    (long long)file->n_bytes, (long long)info.st_size);
    if (mtime_ns(&info) != file->mtime_ns)
        return fail(message, COLIBRI_ERROR_FILE, "%s was written to while it was mapped; open the model again", file->path);
    return COLIBRI_OK;
}

path_kind path_look(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0)
        return lstat(path, &info) == 0 ? PATH_OTHER : PATH_MISSING;
    return S_ISREG(info.st_mode) ? PATH_FILE : S_ISDIR(info.st_mode) ? PATH_FOLDER : PATH_OTHER;
}

void path_list(const char *folder, bool (*visit)(void *user, const char *name), void *user)
{
    DIR *listing = opendir(folder);
    if (listing == NULL)
        return;
    for (struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing)) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && !visit(user, entry->d_name))
            break;
    }
    closedir(listing);
}
