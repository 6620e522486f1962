/* What the workbench learns of the stages of a pass: counters of the CPU or why there are none, and sums by layer and stage. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, madvise */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "colibri_cachelab.h"
#include "support/tiny_model.h"

/* ---- counters -------------------------------------------------------------------------------------------------------------- */

static int refuse(uint32_t type, uint64_t config)
{
    (void)type;
    errno = config % 2 == 0 ? EACCES : ENOENT;
    return -1;
}

static void test_a_refused_event_keeps_its_errno_and_reads_as_nothing(void)
{
    cachelab_counters c;
    cachelab_count counts[CACHELAB_COUNTERS];
    cachelab_counters_open(&c, refuse);
    cachelab_counters_read(&c, counts);
    for (int i = 0; i < CACHELAB_COUNTERS; i++) {
        CHECK(c.files[i] == -1 && (c.errors[i] == EACCES || c.errors[i] == ENOENT));
        CHECK(counts[i].running == 0 && isnan(cachelab_scaled(counts[i])));
    }
    cachelab_counters_close(&c);
}

static void test_every_refusal_has_its_words(void)
{
    const struct {
        int error, paranoid;
        const char *words;
    } known[] = {
        {EACCES, 3, "perf_event_paranoid is 3"}, {EPERM, 4, "perf_event_paranoid is 4"}, {EPERM, 1, "forbids"},
        {ENOENT, 2, "no such event"},            {EOPNOTSUPP, 2, "no such event"},       {ENOSYS, -100, "no perf_event_open"},
        {EMFILE, 2, "too many files"},           {EINVAL, 2, "Invalid argument"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        char reason[CACHELAB_REASON_SIZE];
        cachelab_counter_reason(known[i].error, known[i].paranoid, reason);
        CHECK(strncmp(reason, "not available here: ", 20) == 0 && strstr(reason, known[i].words) != NULL);
    }
}

static void test_a_counter_that_took_turns_is_scaled_to_the_whole_time(void)
{
    CHECK(cachelab_scaled((cachelab_count){30, 100, 25}) == 120);
    CHECK(cachelab_scaled((cachelab_count){30, 100, 100}) == 30);
    CHECK(isnan(cachelab_scaled((cachelab_count){0, 100, 0})));
}

#if defined(__linux__)
#include <linux/perf_event.h>

static int page_faults_instead(uint32_t type, uint64_t config)
{
    (void)type;
    (void)config;
    return cachelab_open_system_event(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_PAGE_FAULTS);
}

enum { PAGES = 64 };

static void *touch_pages(void *memory)
{
    long size = sysconf(_SC_PAGESIZE);
    for (int i = 0; i < PAGES; i++)
        ((volatile unsigned char *)memory)[i * size] = 1;
    return NULL;
}

/* An event of the system itself, which also a virtual machine has. */
static void test_threads_made_later_are_counted_too(void)
{
    cachelab_counters c;
    cachelab_count before[CACHELAB_COUNTERS], after[CACHELAB_COUNTERS];
    size_t n_bytes = (size_t)(PAGES * sysconf(_SC_PAGESIZE));
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t thread;
    CHECK(memory != MAP_FAILED);
#ifdef MADV_NOHUGEPAGE
    madvise(memory, n_bytes, MADV_NOHUGEPAGE);
#endif
    cachelab_counters_open(&c, page_faults_instead);
    if (c.files[0] >= 0) {
        cachelab_counters_read(&c, before);
        CHECK(pthread_create(&thread, NULL, touch_pages, memory) == 0 && pthread_join(thread, NULL) == 0);
        cachelab_counters_read(&c, after);
        CHECK(after[0].running > before[0].running && after[0].value >= before[0].value + PAGES);
    } else {
        CHECK(c.errors[0] != 0);
        printf("counters of other threads: not checked, %s\n", strerror(c.errors[0]));
    }
    cachelab_counters_close(&c);
    CHECK(c.files[0] == -1);
    munmap(memory, n_bytes);
}
#endif

/* ---- stages ---------------------------------------------------------------------------------------------------------------- */

static cachelab_count played[CACHELAB_COUNTERS]; /* what a file of events would say */

static int play(uint32_t type, uint64_t config)
{
    FILE *file = tmpfile(); /* stays open until the program ends */
    (void)type;
    (void)config;
    CHECK(file != NULL && fwrite(&played[0], sizeof played[0], 1, file) == 1 && fwrite(&played[1], sizeof played[1], 1, file) == 1);
    rewind(file);
    return fileno(file);
}

static void test_a_stage_adds_what_passed_between_its_begin_and_its_end(void)
{
    cachelab_counters c;
    cachelab_stage_sum sums[3 * CACHELAB_STAGES] = {{0}};
    cachelab_stages s = {.sums = sums, .n_layers = 2, .faults = true, .counters = &c};
    played[0] = (cachelab_count){100, 10, 10};
    played[1] = (cachelab_count){150, 30, 20};
    cachelab_counters_open(&c, play);
    colibri_stage_event event = {{COLIBRI_STAGE_ROUTER, 1, -1}, 0, 7, true};
    cachelab_stages_observe(&s, &event);
    event.begins = false;
    cachelab_stages_observe(&s, &event);
    cachelab_stage_sum *sum = &sums[CACHELAB_STAGES + COLIBRI_STAGE_ROUTER];
    CHECK(sum->calls == 1 && sum->seconds >= 0 && sum->minor_faults >= 0 && s.tile_tokens == 7);
    for (int i = 0; i < CACHELAB_COUNTERS; i++)
        CHECK(sum->counts[i].value == 50 && sum->counts[i].enabled == 20 && sum->counts[i].running == 10);
    event = (colibri_stage_event){{COLIBRI_STAGE_LOGITS, -1, -1}, 0, 5, true};
    s.counters = NULL;
    cachelab_stages_observe(&s, &event);
    event.begins = false;
    cachelab_stages_observe(&s, &event);
    CHECK(sums[2 * CACHELAB_STAGES + COLIBRI_STAGE_LOGITS].calls == 1 && s.tile_tokens == 7);
    cachelab_counters_close(&c);
}

typedef struct events {
    int n_begun, n_ended;
    colibri_session *session;
    colibri_status inside;
} events;

static void note(void *user, const colibri_stage_event *event)
{
    events *e = user;
    colibri_message message;
    e->n_begun += event->begins;
    e->n_ended += !event->begins;
    e->inside = colibri_session_observe(e->session, NULL, NULL, &message);
}

static int stop(void *user, double done)
{
    (void)done;
    return ((events *)user)->n_begun > 3;
}

static void test_an_interrupted_stage_ends_too_and_an_observer_cannot_change_the_session(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){.max_tokens = 8});
    events e = {.session = s};
    colibri_message message;
    int32_t ids[4];
    tiny_ids(ids, 4, &t, 1);
    CHECK_OK(colibri_session_observe(s, note, &e, &message), message);
    colibri_status status = colibri_session_feed(s, ids, 4, stop, &e, &message);
    CHECK(status == COLIBRI_OK || status == COLIBRI_ERROR_INTERRUPTED);
    CHECK(e.n_begun == e.n_ended && e.n_begun > 3 && e.inside == COLIBRI_ERROR_BUSY);
    CHECK_OK(colibri_session_observe(s, NULL, NULL, &message), message);
    int before = e.n_begun;
    tiny_feed(s, ids, 2);
    CHECK(e.n_begun == before);
    colibri_session_release(s);
    tiny_close(m, &t);
}

/* ---- limits ---------------------------------------------------------------------------------------------------------------- */

static void test_limits_are_rates_and_what_cannot_run_says_so(void)
{
    static unsigned char memory[1 << 16];
    cachelab_stream stream = {memory, 16, sizeof memory / 16};
    double operations;
    CHECK(cachelab_read_seconds(&stream, 1, 2, 4, 512) >= 0);
    CHECK(cachelab_read_seconds(&stream, 1, 0, 1, 0) < 0 && cachelab_read_seconds(&stream, 1, 1, 9, 0) < 0);
    CHECK(cachelab_fma_rate(colibri_isa(), 2, 1000) > 0 && cachelab_fma_rate("abacus", 1, 1000) < 0);
    CHECK(isfinite(cachelab_fma_chains(NULL, 10, 1, &operations)) && operations >= 2 * 10 * 12);
}

int main(void)
{
    RUN(test_a_refused_event_keeps_its_errno_and_reads_as_nothing);
    RUN(test_every_refusal_has_its_words);
    RUN(test_a_counter_that_took_turns_is_scaled_to_the_whole_time);
#if defined(__linux__)
    RUN(test_threads_made_later_are_counted_too);
#endif
    RUN(test_a_stage_adds_what_passed_between_its_begin_and_its_end);
    RUN(test_an_interrupted_stage_ends_too_and_an_observer_cannot_change_the_session);
    RUN(test_limits_are_rates_and_what_cannot_run_says_so);
    return 0;
}
