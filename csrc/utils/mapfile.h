/* mapfile.h: a file mapped read-only. The only file of the engine that talks to the file system. */
#ifndef COLIBRI_MAPFILE_H
#define COLIBRI_MAPFILE_H

#include "status.h"

typedef struct mapfile {
    char *path;
    const unsigned char *data; /* NULL when the file is empty */
    int64_t n_bytes;
    int64_t mtime_ns; /* at the time of opening */
} mapfile;

/* Refuses what is not a regular file (pipe, folder, device) by name, without blocking on it. */
colibri_status mapfile_open(const char *path, mapfile *file, colibri_message *message);
void mapfile_close(mapfile *file);
colibri_status mapfile_check(const mapfile *file, colibri_message *message); /* FILE when size or mtime changed */

#endif
