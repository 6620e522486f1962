/* test_threads.c: parts that cover everything once, in any number of runs, after sleep and after fork; and how many CPUs count as
 * ours. */
#define _GNU_SOURCE /* sched_setaffinity */
#include "../../csrc/utils/threads.h"

#include <sched.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { MOST = 1000 };

typedef struct tally {
    int touched[MOST];
    int64_t size[MOST]; /* of the part that begins here */
} tally;

static void touch(void *argument, int64_t first, int64_t last, int thread)
{
    tally *t = argument;
    CHECK(first < last);
    CHECK(thread >= 0 && thread < COLIBRI_MAX_THREADS);
    t->size[first] = last - first;
    for (int64_t i = first; i < last; i++)
        t->touched[i]++;
}

static void check_run(threads *pool, int64_t n)
{
    static tally t;
    memset(&t, 0, sizeof t);
    threads_run(pool, touch, &t, n);
    for (int64_t i = 0; i < MOST; i++)
        CHECK(t.touched[i] == (i < n));
    int64_t parts = n <= 1 ? 1 : threads_count(pool), at = 0; /* contiguous, sizes differing by at most one */
    while (at < n && t.size[at] > 0) {
        CHECK(t.size[at] == n / parts || t.size[at] == n / parts + 1);
        at += t.size[at];
    }
    CHECK(at == n);
}

static threads *pool_of(int count)
{
    colibri_message message;
    threads *pool;
    CHECK_OK(threads_create(count, &pool, &message), message);
    CHECK(threads_count(pool) == count);
    return pool;
}

typedef struct shares {
    int part_of[COLIBRI_MAX_THREADS]; /* how many parts each thread ran */
    int64_t n;
} shares;

static void count_parts(void *argument, int64_t first, int64_t last, int thread)
{
    shares *s = argument;
    (void)first;
    (void)last;
    s->part_of[thread]++;
}

/* Workers that sleep, or that the system does not run, do not hold up the caller: it does their parts. */
static void test_the_caller_takes_the_parts_that_nobody_has_begun(void)
{
    threads *pool = pool_of(4);
    int by_caller = 0;
    for (int run = 0; run < 2000; run++) {
        shares s = {{0}, 4};
        threads_run(pool, count_parts, &s, s.n);
        int parts = 0;
        for (int thread = 0; thread < 4; thread++)
            parts += s.part_of[thread];
        CHECK(parts == 4);
        by_caller += s.part_of[0] - 1;
    }
    CHECK(by_caller > 0); /* tasks of nothing: some part is always faster done than handed over */
    threads_free(pool);
}

static void test_every_index_is_visited_once(void)
{
    static const int counts[] = {1, 2, 3, 7};
    static const int sizes[] = {0, 1, 2, 3, 6, 7, 8, 100, MOST};
    for (int c = 0; c < 4; c++) {
        threads *pool = pool_of(counts[c]);
        for (int s = 0; s < 9; s++)
            check_run(pool, sizes[s]);
        threads_free(pool);
    }
}

static void add_part(void *argument, int64_t first, int64_t last, int thread)
{
    int64_t *sums = argument;
    for (int64_t i = first; i < last; i++)
        sums[thread] += i;
}

static void test_many_short_runs_see_each_others_results(void)
{
    threads *pool = pool_of(3);
    int64_t sums[3] = {0};
    for (int run = 0; run < 3000; run++)
        threads_run(pool, add_part, sums, 10);
    CHECK(sums[0] + sums[1] + sums[2] == 3000 * 45);
    threads_free(pool);
}

static void test_a_pool_that_fell_asleep_wakes_up(void)
{
    threads *pool = pool_of(2);
    for (int i = 0; i < 5; i++) {
        usleep(20000); /* far longer than a worker spins */
        check_run(pool, 100);
    }
    threads_free(pool);
    threads_free(NULL);
}

static void sleep_long(void *argument, int64_t first, int64_t last, int thread)
{
    (void)argument, (void)first, (void)last;
    if (thread == 1)
        usleep(50000);
}

static void test_the_caller_waits_for_a_slow_worker(void)
{
    threads *pool = pool_of(2);
    for (int i = 0; i < 3; i++)
        threads_run(pool, sleep_long, NULL, 2);
    check_run(pool, 5);
    threads_free(pool);
}

static void test_counts_out_of_range_are_refused_with_the_range(void)
{
    colibri_message message;
    threads *pool;
    CHECK(threads_create(0, &pool, &message) == COLIBRI_ERROR_ARGUMENT && pool == NULL);
    CHECK(threads_create(COLIBRI_MAX_THREADS + 1, &pool, &message) == COLIBRI_ERROR_ARGUMENT && pool == NULL);
    CHECK_MESSAGE_HAS(message, "1 to 256");
}

static void test_a_forked_child_works_alone_and_frees_without_hanging(void)
{
    threads *pool = pool_of(3);
    check_run(pool, 100);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20); /* a hang ends the child by a signal */
        check_run(pool, 100);
        CHECK(threads_at_work(pool) == 1 && threads_count(pool) == 3);
        threads_free(pool);
        _exit(0);
    }
    int state;
    CHECK(waitpid(child, &state, 0) == child && WIFEXITED(state) && WEXITSTATUS(state) == 0);
    CHECK(threads_at_work(pool) == 3);
    check_run(pool, 100);
    threads_free(pool);
}

static char root[] = "/tmp/colibri_threads_XXXXXX";

static void write_file(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *stream = fopen(full, "w");
    CHECK(stream != NULL);
    fputs(text, stream);
    fclose(stream);
}

static int quota(const char *membership)
{
    char path[512], mount[512];
    write_file("cgroup", membership);
    snprintf(path, sizeof path, "%s/cgroup", root);
    snprintf(mount, sizeof mount, "%s/fs", root);
    return threads_cgroup_quota(path, mount);
}

static void test_H2_the_quota_of_the_control_group_is_rounded_down(void)
{
    CHECK(mkdtemp(root) != NULL);
    write_file("fs/cpu.max", "max 100000\n");
    write_file("fs/a/cpu.max", "250000 100000\n");
    write_file("fs/a/b/cpu.max", "max 100000\n");
    write_file("fs/a/tight/cpu.max", "50000 100000\n");
    CHECK(quota("0::/\n") == 0);
    CHECK(quota("0::/a\n") == 2);
    CHECK(quota("0::/a/b\n") == 2);          /* the parent's quota binds */
    CHECK(quota("0::/a/tight\n") == 1);      /* half a CPU still is one thread */
    CHECK(quota("0::/not/visible/here\n") == 0);
    write_file("fs/cpu/v1/cpu.cfs_quota_us", "300000\n");
    write_file("fs/cpu/v1/cpu.cfs_period_us", "100000\n");
    write_file("fs/cpu/free/cpu.cfs_quota_us", "-1\n");
    write_file("fs/cpu/free/cpu.cfs_period_us", "100000\n");
    CHECK(quota("5:cpuset:/other\n4:cpu,cpuacct:/v1\n1:name=systemd:/x\n") == 3);
    CHECK(quota("4:cpuacct,cpu:/free\n0::/\n") == 0);
    CHECK(quota("4:cpu:/v1\n0::/a\n") == 2); /* both hierarchies: the tighter one */
    CHECK(threads_cgroup_quota("/no/such/file", root) == 0);
}

static colibri_cpus usable(void)
{
    colibri_cpus cpus;
    colibri_message message;
    CHECK_OK(threads_usable_cpus(&cpus, &message), message);
    return cpus;
}

static void test_H2_the_default_is_what_affinity_leaves_and_says_so(void)
{
    cpu_set_t all, one;
    CHECK(unsetenv("COLIBRI_CPUS") == 0);
    CHECK(usable().count >= 1 && usable().count <= sysconf(_SC_NPROCESSORS_CONF));
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &all))
            CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(usable().count == 1);
    CHECK(sysconf(_SC_NPROCESSORS_ONLN) == 1 || strcmp(usable().limit, "affinity") == 0);
    CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
}

static void test_H2_the_environment_overrides_both_and_a_wrong_number_is_refused(void)
{
    static const char *const wrong[] = {"0", "-1", "two", "2x", "257", "99999999999999999999"};
    colibri_cpus cpus;
    colibri_message message;
    CHECK(setenv("COLIBRI_CPUS", "7", 1) == 0);
    CHECK(usable().count == 7 && strcmp(usable().limit, "COLIBRI_CPUS") == 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(setenv("COLIBRI_CPUS", wrong[i], 1) == 0);
        CHECK(threads_usable_cpus(&cpus, &message) == COLIBRI_ERROR_ARGUMENT && cpus.count >= 1);
        CHECK_MESSAGE_HAS(message, wrong[i]);
        CHECK_MESSAGE_HAS(message, "1 to 256");
    }
    CHECK(unsetenv("COLIBRI_CPUS") == 0);
}

int main(void)
{
    RUN(test_every_index_is_visited_once);
    RUN(test_the_caller_takes_the_parts_that_nobody_has_begun);
    RUN(test_many_short_runs_see_each_others_results);
    RUN(test_a_pool_that_fell_asleep_wakes_up);
    RUN(test_the_caller_waits_for_a_slow_worker);
    RUN(test_counts_out_of_range_are_refused_with_the_range);
    RUN(test_a_forked_child_works_alone_and_frees_without_hanging);
    RUN(test_H2_the_quota_of_the_control_group_is_rounded_down);
    RUN(test_H2_the_default_is_what_affinity_leaves_and_says_so);
    RUN(test_H2_the_environment_overrides_both_and_a_wrong_number_is_refused);
    return 0;
}
