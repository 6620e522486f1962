/* resident.c: resident FILE.so: what the engine costs a process before a model is opened, as one line of JSON: resident bytes of
 * a program that does nothing, and of the same program with the library loaded and its code path chosen. Linux. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

static long resident_bytes(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%*d %ld", &pages) != 1) pages = -1;
    if (file != NULL) fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

int main(int argc, char **argv) {
    resident_bytes(); /* the pages of reading itself are there before anything counts */
    const long before = resident_bytes();
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    const char *(*isa)(void) = NULL;
    if (library != NULL) *(void **)&isa = dlsym(library, "colibri_isa");
    if (isa == NULL) {
        fprintf(stderr, "resident FILE.so: %s\n", argc == 2 ? dlerror() : "one argument");
        return 1;
    }
    const char *name = isa();
    printf("{\"before\": %ld, \"after\": %ld, \"isa\": \"%s\"}\n", before, resident_bytes(), name);
    return 0;
}
