/* instant.h: the one lock of the process for things that take an instant: a few assignments, a walk of a short list.
 *
 * It is held by one thread at a time, never across a call that waits, and never twice by the same thread. A fork waits until
 * nobody holds it, so that a child finds it free and what it guards whole, whatever other threads were doing. A lock of one's own
 * would stay locked in the child forever when another thread held it. */
#ifndef COLIBRI_INSTANT_H
#define COLIBRI_INSTANT_H

void instant_begin(void);
void instant_end(void);

#endif
