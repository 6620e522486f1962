#include "system_file.h"

#include <stdio.h>
#include <string.h>

int64_t system_number(const char *path, const char *key)
{
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return -1;
    char line[256];
    int64_t number = -1;
    size_t length = key == NULL ? 0 : strlen(key);
    while (number < 0 && fgets(line, sizeof line, file) != NULL) {
        long long value;
        if ((key == NULL || strncmp(line, key, length) == 0) && sscanf(line + length, "%lld", &value) == 1)
            number = (int64_t)value;
        if (key == NULL)
            break;
    }
    fclose(file);
    return number;
}

bool system_says(const char *path, const char *word)
{
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return false;
    char line[256];
    bool found = fgets(line, sizeof line, file) != NULL && strstr(line, word) != NULL;
    fclose(file);
    return found;
}
