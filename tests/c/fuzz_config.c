/* Fuzz target: any bytes as config.json. What is accepted must hold the promises of config.h, and its frequencies can be
 * computed.
 * tools/soak.sh builds and runs it. */
#include "model/config.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { MOST = 4096 }; /* of head_dim, so that the frequencies fit the stack */
    static config c;
    colibri_message message;
    if (config_read((const char *)data, size, "fuzz", &c, &message) != COLIBRI_OK)
        return 0;
    if (c.num_experts < 1 || c.num_experts > COLIBRI_MAX_EXPERTS || c.top_k < 1 || c.top_k > c.num_experts ||
        c.num_hidden_layers < 1 || c.num_hidden_layers > COLIBRI_MAX_LAYERS ||
        c.num_attention_heads % c.num_key_value_heads != 0 || c.head_dim < 2 || c.head_dim % 2 != 0)
        abort();
    if (c.head_dim <= MOST) {
        float inv_freq[MOST / 2];
        rope_inv_freq(&c, inv_freq);
    }
    return 0;
}
