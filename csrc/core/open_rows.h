/* open_rows.h: the rows of an open pass, looked at and changed between two stages. As in colibri.h. */
#ifndef COLIBRI_CORE_OPEN_ROWS_H
#define COLIBRI_CORE_OPEN_ROWS_H

#include "session.h"

/* open_tap, or open_edit; *holder receives the block of the array with one more reference. */
colibri_status session_open_rows(session *s, size_t kind, int64_t layer, int64_t expert, bool edit, colibri_array *array,
                                 block **holder, colibri_message *message);

colibri_status session_open_write(session *s, size_t kind, int64_t layer, int64_t expert, const colibri_array *rows,
                                  colibri_message *message);

#endif
