/* mapfile.h: a file mapped read-only. The only file of the engine that talks to the file system.
 *
 * mapfile_open refuses what is not a regular file (pipe, folder, device) by name, without blocking on it; a symbolic link is
 * followed. mapfile_check tells whether the mapped bytes were truncated or rewritten in place. A file that was removed, or
 * replaced by a rename, is not an error: the mapping keeps the old content. What happens between two checks cannot be seen. */
#ifndef COLIBRI_MAPFILE_H
#define COLIBRI_MAPFILE_H

#include "status.h"

typedef struct mapfile {
    char *path;
    const unsigned char *data; /* NULL when the file is empty */
    int64_t n_bytes;
    int64_t mtime_ns;          /* at the time of opening */
    uint64_t device, inode;    /* tell a file from one that has taken its place */
} mapfile;

colibri_status mapfile_open(const char *path, mapfile *file, colibri_message *message);
void mapfile_close(mapfile *file); /* a zeroed mapfile is fine */
colibri_status mapfile_check(const mapfile *file, colibri_message *message); /* FILE when size or mtime changed */

/* A link that points to nothing is PATH_OTHER: mapfile_open says what is wrong with it. */
typedef enum path_kind { PATH_MISSING = 0, PATH_FILE, PATH_FOLDER, PATH_OTHER } path_kind;
path_kind path_look(const char *path);

/* Calls visit(user, name) for every entry of a folder, in no order, until it returns false. A folder that cannot be read has no
 * entries. */
void path_list(const char *folder, bool (*visit)(void *user, const char *name), void *user);

#endif
