/* handles.h: what the opaque types of colibri.h are. A model lives while anyone holds a reference: the opener, sessions, leases.
 */
#ifndef COLIBRI_API_HANDLES_H
#define COLIBRI_API_HANDLES_H

#include "../core/session.h"

struct colibri_model {
    model_data *data;
    int64_t references; /* atomic */
    int64_t users;      /* atomic: sessions and leases, which are references too */
};

struct colibri_session {
    session *inner;
    colibri_model *model;
};

struct colibri_lease {
    block *held; /* NULL: the model's mapped files */
    colibri_model *model;
};

void model_add_user(colibri_model *model);
void model_drop_user(colibri_model *model);

/* A lease on `held`, whose reference it takes over, even when there is no memory for the lease. */
colibri_status lease_create(colibri_model *model, block *held, colibri_lease **out, colibri_message *message);

#endif
