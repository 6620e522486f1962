/* topk.c: the k best experts by a branch-free selection network.
 *
 * Each score becomes a 64-bit key whose unsigned order is the wanted order: the float's bits made monotonic above, the complement
 * of the index below, so that all keys differ and a tie goes to the lower index. NaN gets the lowest upper half; -0 is turned
 * into +0, since they are equal. The keys are cut into blocks of K, the power of two above k. A bitonic network sorts each block,
 * then block after block is merged into the first: of two sorted blocks the element-wise maximum of one and the reversed other
 * holds the K largest and is bitonic, so half a sorting network puts it in order. Which keys are compared depends on n and k
 * alone. */
#include "float32.h"
#include "kernels.h"

static int64_t power_of_two_from(int64_t n)
{
    int64_t power = 1;
    while (power < n)
        power *= 2;
    return power;
}

size_t topk_scratch(int64_t n)
{
    return (size_t)power_of_two_from(n) * sizeof(uint64_t); /* whole blocks of any K <= n fit: K divides this power */
}

static uint64_t key_of(float score, int64_t index)
{
    uint32_t bits = float_bits(score);
    bits &= 0u - (uint32_t)(bits != 0x80000000);                   /* -0 -> +0 */
    uint32_t ordered = bits ^ ((0u - (bits >> 31)) | 0x80000000);  /* negative: all bits flip; positive: the sign only */
    ordered &= 0u - (uint32_t)((bits & 0x7fffffff) <= 0x7f800000); /* NaN -> 0, below -Inf, whose value is 0x007fffff */
    return (uint64_t)ordered << 32 | (uint32_t)~(uint32_t)index;
}

/* The larger key to *high, the other to *low, without a branch. */
static void order(uint64_t *high, uint64_t *low)
{
    uint64_t a = *high, b = *low, swap = (a ^ b) & (0 - (uint64_t)(a < b));
    *high = a ^ swap;
    *low = b ^ swap;
}

/* Each block of `size` keys is bitonic; afterwards those blocks descend in which bit `direction` of the position is 0, the others
 * ascend. */
static void merge_blocks(uint64_t *keys, int64_t count, int64_t size, int64_t direction)
{
    for (int64_t distance = size / 2; distance > 0; distance /= 2)
        for (int64_t i = 0; i < count; i++)
            if ((i & distance) == 0) {
                if ((i & direction) == 0)
                    order(&keys[i], &keys[i + distance]);
                else
                    order(&keys[i + distance], &keys[i]);
            }
}

void topk(int32_t *ids, const float *scores, int64_t n, int64_t k, void *scratch)
{
    uint64_t *keys = scratch;
    int64_t block = power_of_two_from(k), count = (n + block - 1) / block * block;
    for (int64_t i = 0; i < n; i++)
        keys[i] = key_of(scores[i], i);
    for (int64_t i = n; i < count; i++)
        keys[i] = 0; /* below every key of a score, NaN included: those have a complemented index in the lower half */

    for (int64_t size = 2; size <= block; size *= 2)
        merge_blocks(keys, count, size, size < block ? size : 0);
    for (int64_t start = block; start < count; start += block) {
        for (int64_t i = 0; i < block; i++)
            order(&keys[i], &keys[start + block - 1 - i]);
        merge_blocks(keys, block, block, 0);
    }

    for (int64_t i = 0; i < k; i++)
        ids[i] = (int32_t)~(uint32_t)keys[i];
}
