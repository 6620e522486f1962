/* aggregator.h: expert outputs back in token order, weighted by their gates. */
#ifndef COLIBRI_CORE_AGGREGATOR_H
#define COLIBRI_CORE_AGGREGATOR_H

#include "machine.h"

/* routed[t] = the chain acc = fma(gates[t][s], packed[places[t][s]], acc) over the slots s in order, from +0; a slot of
 * place -1 takes no part. Rows have `width` floats. */
void aggregate_routed(machine *m, float *routed, const float *packed, const float *gates, const int64_t *places, int64_t n,
                      int64_t k, int64_t width);

/* out[t] = fma(gate[t], shared[t], routed[t]) */
void aggregate_shared(machine *m, float *out, const float *routed, const float *shared, const float *gate, int64_t n,
                      int64_t width);

#endif
