/* mapguard.h: a file that shrinks while it is mapped must cost an error, not the process.
 *
 * Touching a mapped page whose bytes are gone from the file, or writing one for which the disk has no room, raises SIGBUS. Between mapguard_enter and mapguard_leave a handler answers for the
 * mappings that were added here: it puts a page of zeros over the lost one, notes the loss and lets the access go on, on whichever thread it
 * happened. Nothing unwinds, so worker threads and locks stay whole; the caller asks for the loss when its work is done and fails.
 * A SIGBUS anywhere else goes to the handler that was there before.
 *
 * Not promised: reads outside enter and leave (a raw view of a mapped weight) are not guarded; a page already lost reads as zeros there too. */
#ifndef COLIBRI_MAPGUARD_H
#define COLIBRI_MAPGUARD_H

#include "status.h"

/* data is page aligned, as mmap gives it. MEMORY when the table cannot grow. Any thread. */
colibri_status mapguard_add(const void *data, int64_t n_bytes, colibri_message *message);
void mapguard_remove(const void *data); /* before the mapping goes; unknown addresses are ignored */

/* Calls nest and may overlap between threads; each enter needs one leave. */
void mapguard_enter(void);
void mapguard_leave(void);

bool mapguard_lost(const void *data); /* has the mapping that begins at data lost a page? Never forgotten while it is added. */

#endif
