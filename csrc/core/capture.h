/* capture.h: which taps a session keeps. */
#ifndef COLIBRI_CORE_CAPTURE_H
#define COLIBRI_CORE_CAPTURE_H

#include "../utils/status.h"
#include "taps.h"

/* Marks in kept[layer * TAP_COUNT + tap] the taps that the patterns ask for. A pattern is a level ("none", "routing", "moe",
 * "all") or a path in which '*' stands for any run of characters; a tap of level NAMED needs its last word spelled out. One that
 * matches nothing is an ARGUMENT error naming the nearest path. Marks stand at the place of storage (taps.h), those of a tap of
 * the whole model at layer 0.
 * kept holds num_hidden_layers * TAP_COUNT entries, all false on entry. */
colibri_status capture_resolve(const config *c, const char *const *patterns, size_t n_patterns, bool *kept,
                               colibri_message *message);

/* How to ask for a tap that was not kept, as a clause of a sentence: capture "moe" or the path itself. */
const char *capture_level_name(colibri_level level);

#endif
