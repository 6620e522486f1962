/* system_file.h: numbers and words that the system shows in small text files (/proc, /sys). Absent files are no error. */
#ifndef COLIBRI_SYSTEM_FILE_H
#define COLIBRI_SYSTEM_FILE_H

#include <stdbool.h>
#include <stdint.h>

/* The number after `key` at the start of a line (NULL: the file holds one number), or -1. "max" and absent files give -1. */
int64_t system_number(const char *path, const char *key);
bool system_says(const char *path, const char *word); /* is `word` in the file's first line? */

#endif
