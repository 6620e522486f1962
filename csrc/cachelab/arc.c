/* arc.c: adaptive replacement (Megiddo and Modha, 2003). Lists 0 and 1 are T1 and T2 of the paper, what is there after one use and
 * after more; 2 and 3 are B1 and B2, what left them and is remembered. The goal is its p, the size that T1 should have, in whole
 * places. The paper makes room in the memories first; forgetting the oldest afterwards comes to the same. */
#include "sim.h"

enum { ONCE, OFTEN, LEFT_ONCE, LEFT_OFTEN };

static int64_t at_least_one(int64_t a, int64_t b)
{
    return a / b > 1 ? a / b : 1;
}

static void forget(cachelab_sim *s)
{
    int64_t *n = s->lists.count;
    while (n[LEFT_ONCE] > 0 && n[ONCE] + n[LEFT_ONCE] > s->places)
        list_remove(s, list_oldest(s, LEFT_ONCE));
    while (n[LEFT_OFTEN] > 0 && n[ONCE] + n[OFTEN] + n[LEFT_ONCE] + n[LEFT_OFTEN] > 2 * s->places)
        list_remove(s, list_oldest(s, LEFT_OFTEN));
}

static void used(cachelab_sim *s, int32_t key)
{
    list_move(s, key, OFTEN);
}

static void wanted(cachelab_sim *s, int32_t key)
{
    key_lists *l = &s->lists;
    l->from_often = l->list[key] == LEFT_OFTEN;
    if (l->list[key] == LEFT_ONCE) {
        l->goal += at_least_one(l->count[LEFT_OFTEN], l->count[LEFT_ONCE]);
        l->goal = l->goal < s->places ? l->goal : s->places;
    } else if (l->from_often) {
        l->goal -= at_least_one(l->count[LEFT_ONCE], l->count[LEFT_OFTEN]);
        l->goal = l->goal > 0 ? l->goal : 0;
    }
}

static void entered(cachelab_sim *s, int32_t key, bool asked)
{
    bool remembered = s->lists.list[key] != NOWHERE;
    if (remembered)
        list_remove(s, key);
    list_append(s, key, asked && remembered ? OFTEN : ONCE);
    s->lists.from_often = false;
    forget(s);
}

static void left(cachelab_sim *s, int32_t key)
{
    list_move(s, key, s->lists.list[key] == ONCE ? LEFT_ONCE : LEFT_OFTEN);
}

static int32_t victim(cachelab_sim *s)
{
    int64_t once = s->lists.count[ONCE];
    int8_t list = once > s->lists.goal || (once == s->lists.goal && s->lists.from_often) ? ONCE : OFTEN;
    int32_t key = list_victim(s, list);
    return key >= 0 ? key : list_victim(s, list == ONCE ? OFTEN : ONCE);
}

static void resized(cachelab_sim *s)
{
    if (s->lists.goal > s->places)
        s->lists.goal = s->places;
    forget(s);
}

const policy_ops cachelab_arc = {used, wanted, entered, left, victim, resized};
