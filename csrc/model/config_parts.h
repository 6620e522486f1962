/* config_parts.h: the pieces of config_read that have a file of their own. Each reads its keys and fills its fields of the
 * config. */
#ifndef COLIBRI_MODEL_CONFIG_PARTS_H
#define COLIBRI_MODEL_CONFIG_PARTS_H

#include "family.h"
#include "options.h"

/* rope: needs head_dim and max_position_embeddings. */
colibri_status config_read_rope(options *o, const family *f, config *c);

/* is_moe and window of every layer: needs num_hidden_layers. */
colibri_status config_read_layers(options *o, const family *f, config *c);

#endif
