/* test_select.c: COLIBRI_ISA forces a table or is refused with the list. The variable is read once, so each case runs in a
 * process of its own. */
#define _DEFAULT_SOURCE
#include "../../csrc/kernels/kernels.h"
#include "../../csrc/utils/status.h"

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* In a child: with COLIBRI_ISA = name (NULL: not set), select gives `expected`, and the table in force is `table`, or the best
 * for NULL. */
static void check_in_child(const char *name, colibri_status expected, const char *table)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        const kernels *const *tables;
        colibri_message message = {""};
        if (name == NULL)
            unsetenv("COLIBRI_ISA");
        else
            setenv("COLIBRI_ISA", name, 1);
        colibri_status status = kernels_select(&message);
        size_t n_tables = kernels_available(&tables);
        CHECK(status == expected && status == kernels_select(&message));
        CHECK(strcmp(kernels_in_force()->name, table == NULL ? tables[0]->name : table) == 0);
        for (size_t t = 0; expected != COLIBRI_OK && t < n_tables; t++)
            CHECK_MESSAGE_HAS(message, tables[t]->name);
        _exit(0);
    }
    int state;
    CHECK(waitpid(child, &state, 0) == child && WIFEXITED(state) && WEXITSTATUS(state) == 0);
}

static void test_I3_each_available_name_forces_its_table(void)
{
    const kernels *const *tables;
    char names[8][16];
    size_t n_tables;
    int pipe_ends[2]; /* the list comes from a child too: this process must not read the variable before it forks */
    CHECK(pipe(pipe_ends) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        memset(names, 0, sizeof names);
        n_tables = kernels_available(&tables);
        for (size_t t = 0; t < n_tables; t++)
            strncpy(names[t], tables[t]->name, sizeof names[t] - 1);
        CHECK(write(pipe_ends[1], names, sizeof names) == (ssize_t)sizeof names);
        _exit(0);
    }
    CHECK(read(pipe_ends[0], names, sizeof names) == (ssize_t)sizeof names && waitpid(child, NULL, 0) == child);
    for (size_t t = 0; t < 8 && names[t][0] != '\0'; t++)
        check_in_child(names[t], COLIBRI_OK, names[t]);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
}

static void test_I3_an_unavailable_name_is_refused_with_the_list(void)
{
    check_in_child("mmx", COLIBRI_ERROR_UNSUPPORTED, NULL);
    check_in_child("AVX2", COLIBRI_ERROR_UNSUPPORTED, NULL);
    check_in_child("scalar ", COLIBRI_ERROR_UNSUPPORTED, NULL);
    check_in_child("a name that is much longer than any name of an instruction set", COLIBRI_ERROR_UNSUPPORTED, NULL);
}

static void test_without_the_variable_the_best_table_runs(void)
{
    check_in_child(NULL, COLIBRI_OK, NULL);
    check_in_child("", COLIBRI_OK, NULL);
}

int main(void)
{
    RUN(test_I3_an_unavailable_name_is_refused_with_the_list);
    RUN(test_without_the_variable_the_best_table_runs);
    RUN(test_I3_each_available_name_forces_its_table);
    return 0;
}
