/* One thread is inside a session at a time; a pass that is stopped, or whose weights file is cut, leaves the session as it was. */
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "api/handles.h"
#include "support/snapshot.h"
#include "support/tiny_model.h"

typedef struct visitor {
    colibri_session *session;
    const void *expected; /* router logits of layer 0 so far */
    size_t n_bytes;
    int visits;
} visitor;

static void *visit(void *argument)
{
    visitor *v = argument;
    colibri_message message;
    colibri_lease *lease;
    CHECK(colibri_session_feed(v->session, (int32_t[]){1}, 1, NULL, NULL, &message) == COLIBRI_ERROR_BUSY);
    CHECK_MESSAGE_HAS(message, "session busy");
    CHECK(colibri_session_truncate(v->session, 0, &message) == COLIBRI_ERROR_BUSY);
    colibri_array a = tiny_tap(v->session, "layers.{l}.moe.router_logits", 0, 0, -1, &lease);
    CHECK(a.shape[0] == 4 && memcmp(a.data, v->expected, v->n_bytes) == 0);
    colibri_lease_release(lease);
    v->visits++;
    return NULL;
}

static int let_visit(void *user, double done)
{
    pthread_t thread;
    CHECK(done >= 0 && done < 1);
    CHECK(pthread_create(&thread, NULL, visit, user) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    return 0;
}

static void test_H1_a_second_thread_is_refused_and_may_read_closed_rows_meanwhile(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .threads = 2, .max_tokens = 16});
    colibri_message message;
    colibri_lease *lease;
    tiny_feed(s, (int32_t[]){1, 2, 3, 4}, 4);
    colibri_array a = tiny_tap(s, "layers.{l}.moe.router_logits", 0, 0, -1, &lease);
    visitor v = {.session = s, .n_bytes = 4 * (size_t)t.experts * 4};
    void *expected = malloc(v.n_bytes);
    memcpy(expected, a.data, v.n_bytes);
    v.expected = expected;
    colibri_lease_release(lease);
    s->inner->machine.interval_ns = 0; /* ask between any two blocks of work */
    CHECK_OK(colibri_session_feed(s, (int32_t[]){5, 6}, 2, let_visit, &v, &message), message);
    CHECK(v.visits > 3 && colibri_session_length(s) == 6);
    free(expected);
    colibri_session_release(s);
    tiny_close(m, &t);
}

typedef struct stopper {
    int calls, stop_at;
    double last;
} stopper;

static int stop_later(void *user, double done)
{
    stopper *p = user;
    CHECK(done >= p->last && done < 1);
    p->last = done;
    return ++p->calls == p->stop_at;
}

static void test_G4_a_pass_stopped_anywhere_leaves_the_session_as_it_was(void)
{
    enum { n_before = 5, n = 9 };
    tiny_checkpoint t = tiny_qwen2_moe();
    colibri_model *m = tiny_open(&t);
    int32_t ids[n];
    colibri_message message;
    tiny_ids(ids, n, &t, 8);
    colibri_session *fresh = tiny_session(m, &(tiny_options){{"all"}, .max_tokens = n});
    tiny_feed(fresh, ids, n_before);
    snapshot before = snapshot_take(fresh);
    tiny_feed(fresh, ids + n_before, n - n_before);
    snapshot after = snapshot_take(fresh);

    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .threads = 3, .max_tokens = n});
    s->inner->machine.interval_ns = 0;
    tiny_feed(s, ids, n_before);
    int stops = 0;
    for (int stop_at = 1;; stop_at++) {
        stopper p = {.stop_at = stop_at};
        colibri_status status = colibri_session_feed(s, ids + n_before, n - n_before, stop_later, &p, &message);
        if (status == COLIBRI_OK)
            break;
        CHECK(status == COLIBRI_ERROR_INTERRUPTED && p.calls == stop_at);
        CHECK(colibri_session_length(s) == n_before && colibri_session_pass_count(s) == 1);
        snapshot now = snapshot_take(s);
        snapshot_same(&now, &before, "stopped");
        snapshot_free(&now);
        stops++;
    }
    CHECK(stops > 20);
    snapshot end = snapshot_take(s);
    snapshot_same(&end, &after, "fed after stops");
    snapshot_free(&before);
    snapshot_free(&after);
    snapshot_free(&end);
    colibri_session_release(s);
    colibri_session_release(fresh);
    tiny_close(m, &t);
}

typedef struct cutter {
    char path[512];
    int calls;
} cutter;

static int cut_file(void *user, double done)
{
    cutter *c = user;
    (void)done;
    if (++c->calls == 4)
        CHECK(truncate(c->path, 64) == 0);
    return 0;
}

static void test_E1_a_weights_file_cut_under_a_pass_spoils_the_pass_and_nothing_else(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .threads = 2, .max_tokens = 16});
    colibri_message message;
    cutter c = {.calls = 0};
    snprintf(c.path, sizeof c.path, "%s/model.safetensors", t.folder);
    tiny_feed(s, (int32_t[]){1, 2, 3}, 3);
    snapshot before = snapshot_take(s);
    s->inner->machine.interval_ns = 0;
    CHECK(colibri_session_feed(s, (int32_t[]){4, 5}, 2, cut_file, &c, &message) == COLIBRI_ERROR_FILE);
    CHECK_MESSAGE_HAS(message, "model.safetensors changed while it was mapped");
    CHECK(c.calls > 4 && colibri_session_length(s) == 3);
    CHECK(colibri_session_feed(s, (int32_t[]){4}, 1, NULL, NULL, &message) == COLIBRI_ERROR_FILE);
    snapshot after = snapshot_take(s);
    snapshot_same(&after, &before, "after the file was cut");
    snapshot_free(&before);
    snapshot_free(&after);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void *feed_many(void *argument)
{
    colibri_session *s = argument;
    for (int i = 0; i < 30; i++)
        tiny_feed(s, (int32_t[]){i % 20, (i * 7) % 20}, 2);
    return NULL;
}

static void test_H1_sessions_of_one_model_are_independent(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        s[i] = tiny_session(m, &(tiny_options){{"all"}, .threads = 1 + i, .max_tokens = 60});
        CHECK(pthread_create(&threads[i], NULL, feed_many, s[i]) == 0);
    }
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    snapshot first = snapshot_take(s[0]);
    for (int i = 1; i < 3; i++) {
        snapshot other = snapshot_take(s[i]);
        snapshot_same(&other, &first, "three sessions");
        snapshot_free(&other);
    }
    snapshot_free(&first);
    for (int i = 0; i < 3; i++)
        colibri_session_release(s[i]);
    tiny_close(m, &t);
}

typedef struct forker {
    colibri_session *session;
    pid_t child;
} forker;

static void *fork_one(void *argument)
{
    forker *f = argument;
    f->child = fork();
    if (f->child != 0)
        return NULL;
    alarm(20); /* a hang ends the child by a signal */
    colibri_message message;
    CHECK(colibri_session_feed(f->session, (int32_t[]){1}, 1, NULL, NULL, &message) == COLIBRI_ERROR_BUSY);
    CHECK_MESSAGE_HAS(message, "in use when this process was forked off");
    CHECK_MESSAGE_HAS(message, "open a new session");
    CHECK(colibri_session_threads(f->session) == 1 && colibri_session_threads_asked(f->session) == 2);
    CHECK(colibri_session_length(f->session) == 3 && colibri_session_memory_use(f->session).reserved > 0);
    /* One thread: the thread sanitizer follows none that a child starts. The tests in Python start them. */
    colibri_session *own = tiny_session(f->session->model, &(tiny_options){{"all"}, .threads = 1, .max_tokens = 8});
    tiny_feed(own, (int32_t[]){1, 2, 3}, 3);
    snapshot a = snapshot_take(own), b = snapshot_take(f->session);
    CHECK(snapshot_same(&a, &b, "in a child") == b.n && b.n > 0);
    colibri_session_release(own);
    _exit(0);
}

static int let_fork(void *user, double done)
{
    forker *f = user;
    pthread_t thread;
    (void)done;
    if (f->child != 0)
        return 0;
    CHECK(pthread_create(&thread, NULL, fork_one, f) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    return 0;
}

static void test_a_child_forked_in_the_middle_of_a_pass_refuses_that_session_and_runs_its_own(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s = tiny_session(m, &(tiny_options){{"all"}, .threads = 2, .max_tokens = 8});
    colibri_message message;
    forker f = {.session = s};
    int state;
    tiny_feed(s, (int32_t[]){1, 2, 3}, 3);
    CHECK_OK(colibri_session_feed(s, (int32_t[]){4, 5}, 2, let_fork, &f, &message), message);
    CHECK(waitpid(f.child, &state, 0) == f.child && WIFEXITED(state) && WEXITSTATUS(state) == 0);
    CHECK(colibri_session_length(s) == 5);
    colibri_session_release(s);
    tiny_close(m, &t);
}

static void test_H2_more_threads_than_cpus_are_asked_for_and_not_made(void)
{
    tiny_checkpoint t = tiny_mixtral();
    colibri_model *m = tiny_open(&t);
    colibri_session *s;
    colibri_message message;
    CHECK(setenv("COLIBRI_CPUS", "2", 1) == 0);
    colibri_session_options o = {.size = sizeof o, .max_tokens = 8, .threads = 64};
    CHECK_OK(colibri_session_create(m, &o, &s, &message), message);
    CHECK(colibri_session_threads(s) == 2 && colibri_session_threads_asked(s) == 64);
    colibri_session_release(s);
    o.threads = 0;
    CHECK_OK(colibri_session_create(m, &o, &s, &message), message);
    CHECK(colibri_session_threads(s) == 2 && colibri_session_threads_asked(s) == 0);
    colibri_session_release(s);
    CHECK(setenv("COLIBRI_CPUS", "some", 1) == 0);
    CHECK(colibri_session_create(m, &o, &s, &message) == COLIBRI_ERROR_ARGUMENT && s == NULL);
    CHECK_MESSAGE_HAS(message, "COLIBRI_CPUS is \"some\"");
    tiny_close(m, &t);
}

int main(void)
{
    RUN(test_H1_a_second_thread_is_refused_and_may_read_closed_rows_meanwhile);
    RUN(test_G4_a_pass_stopped_anywhere_leaves_the_session_as_it_was);
    RUN(test_E1_a_weights_file_cut_under_a_pass_spoils_the_pass_and_nothing_else);
    RUN(test_H1_sessions_of_one_model_are_independent);
    RUN(test_a_child_forked_in_the_middle_of_a_pass_refuses_that_session_and_runs_its_own);
    RUN(test_H2_more_threads_than_cpus_are_asked_for_and_not_made);
    return 0;
}
