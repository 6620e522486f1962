/* status.h: how a function inside the engine fails: return fail(message, STATUS, "sentence ...", ...). */
#ifndef COLIBRI_STATUS_H
#define COLIBRI_STATUS_H

#include "colibri.h"

#if defined(__GNUC__)
#define COLIBRI_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define COLIBRI_PRINTF(text, first)
#endif

/* Writes the sentence (cut with "..." when too long; message may be NULL) and returns status. */
colibri_status fail(colibri_message *message, colibri_status status, const char *format, ...) COLIBRI_PRINTF(3, 4);

#define TRY(call)                                  \
    do {                                           \
        colibri_status try_status = (call);        \
        if (try_status != COLIBRI_OK)              \
            return try_status;                     \
    } while (0)

#endif
