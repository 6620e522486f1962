/* cpu_quota.c: how many CPUs this process may really use: its affinity mask, limited by the CPU quota of its control groups.
 *
 * The host's CPU count is the wrong answer in a container: with a quota of one CPU, 64 threads spend their time being throttled.
 * */
#define _GNU_SOURCE /* sched_getaffinity, CPU_ALLOC */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "threads.h"

static int online_count(void)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : online > COLIBRI_MAX_THREADS ? COLIBRI_MAX_THREADS : (int)online;
}

static int affinity_count(void)
{
#if defined(__linux__)
    for (int n_cpus = 1024; n_cpus <= 1 << 20; n_cpus *= 2) { /* the kernel refuses a set smaller than its own */
        cpu_set_t *set = CPU_ALLOC(n_cpus);
        if (set == NULL)
            break;
        size_t n_bytes = CPU_ALLOC_SIZE(n_cpus);
        int count = sched_getaffinity(0, n_bytes, set) == 0 ? CPU_COUNT_S(n_bytes, set) : 0;
        CPU_FREE(set);
        if (count > 0)
            return count > COLIBRI_MAX_THREADS ? COLIBRI_MAX_THREADS : count;
    }
#endif
    return online_count();
}

static bool read_line(const char *folder, const char *group, const char *file, char *line, int size)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s%s/%s", folder, group, file) >= (int)sizeof path)
        return false;
    FILE *stream = fopen(path, "r");
    if (stream == NULL)
        return false;
    bool found = fgets(line, size, stream) != NULL;
    fclose(stream);
    return found;
}

/* CPUs that one group grants, 0 when it sets no limit. */
static double group_quota(const char *folder, const char *group, bool version2)
{
    char line[128];
    double quota, period;
    if (version2) {
        if (!read_line(folder, group, "cpu.max", line, sizeof line) || sscanf(line, "%lf %lf", &quota, &period) != 2)
            return 0; /* "max 100000" does not scan */
        return quota > 0 && period > 0 ? quota / period : 0;
    }
    if (!read_line(folder, group, "cpu.cfs_quota_us", line, sizeof line) || sscanf(line, "%lf", &quota) != 1 || quota <= 0)
        return 0;
    if (!read_line(folder, group, "cpu.cfs_period_us", line, sizeof line) || sscanf(line, "%lf", &period) != 1 || period <= 0)
        return 0;
    return quota / period;
}

/* The tightest limit from `group` up to the root: a parent's quota binds its children. */
static double tightest_quota(const char *folder, char *group, bool version2)
{
    double tightest = 0;
    for (;;) {
        double quota = group_quota(folder, group, version2);
        if (quota > 0 && (tightest == 0 || quota < tightest))
            tightest = quota;
        char *slash = strrchr(group, '/');
        if (slash == NULL)
            return tightest;
        *slash = '\0';
    }
}

/* "cpu,cpuacct" does, "cpuset" does not. */
static bool lists_cpu(const char *controllers)
{
    for (const char *at = controllers; at != NULL; at = strchr(at, ','), at = at != NULL ? at + 1 : NULL)
        if (strncmp(at, "cpu", 3) == 0 && (at[3] == ',' || at[3] == '\0'))
            return true;
    return false;
}

int threads_cgroup_quota(const char *membership, const char *mount)
{
    FILE *stream = fopen(membership, "r");
    char line[4096], folder[4096];
    double tightest = 0;
    if (stream == NULL)
        return 0;
    while (fgets(line, sizeof line, stream) != NULL) { /* "id:controllers:/path"; version 2 has id 0 and no controllers */
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':'), *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (group == NULL)
            continue;
        *controllers++ = *group++ = '\0';
        bool version2 = controllers[0] == '\0';
        if (!version2 && !lists_cpu(controllers))
            continue;
        snprintf(folder, sizeof folder, "%s%s", mount, version2 ? "" : "/cpu");
        if (strcmp(group, "/") == 0)
            group[0] = '\0';
        double quota = tightest_quota(folder, group, version2);
        if (quota > 0 && (tightest == 0 || quota < tightest))
            tightest = quota;
    }
    fclose(stream);
    return tightest == 0 ? 0 : tightest < 1 ? 1 : tightest > COLIBRI_MAX_THREADS ? COLIBRI_MAX_THREADS : (int)tightest;
}

colibri_status threads_usable_cpus(colibri_cpus *out, colibri_message *message)
{
    int affinity = affinity_count(), quota = threads_cgroup_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    *out = (colibri_cpus){affinity, affinity < online_count() ? "affinity" : "this machine"};
    if (quota > 0 && quota < affinity)
        *out = (colibri_cpus){quota, "cgroup quota"};

    const char *text = getenv("COLIBRI_CPUS");
    if (text == NULL || *text == '\0')
        return COLIBRI_OK;
    char *end;
    long count = strtol(text, &end, 10);
    if (*end != '\0' || count < 1 || count > COLIBRI_MAX_THREADS)
        return fail(message, COLIBRI_ERROR_ARGUMENT, "COLIBRI_CPUS is \"%.40s\"; it can be 1 to %d, the CPUs to count as ours", text,
                    COLIBRI_MAX_THREADS);
    *out = (colibri_cpus){(int)count, "COLIBRI_CPUS"};
    return COLIBRI_OK;
}
