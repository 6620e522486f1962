/* profile.h: what each stage of a run took, for the command line. */
#ifndef COLIBRI_TOOLS_PROFILE_H
#define COLIBRI_TOOLS_PROFILE_H

#include "colibri.h"

typedef struct profile profile;

/* Opens the counters of the calling thread: before the session, whose threads are then counted too. NULL: no memory. */
profile *profile_create(const colibri_model *model);
void profile_free(profile *p); /* accepts NULL */

/* From now on the session is watched. */
colibri_status profile_watch(profile *p, colibri_session *session, colibri_message *message);

/* A pass has ended: what it took belongs to the prefill (the first one) or to decode. */
colibri_status profile_pass(profile *p, colibri_session *session, colibri_message *message);

void profile_print(const profile *p);

#endif
