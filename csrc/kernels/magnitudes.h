/* magnitudes.h: the kernel that a watched pass runs over every value, included by each instruction set's file: plain C of 32-bit
 * integers, of which its compiler makes the vectors of that set. */
#include <string.h>

static void magnitudes(uint32_t *largest, uint32_t *least, const void *src, int64_t n)
{
    const unsigned char *bytes = src;
    uint32_t high = 0, low = UINT32_MAX;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, bytes + 4 * i, sizeof bits);
        bits &= 0x7fffffff;
        high = bits > high ? bits : high;
        bits -= 1; /* a zero becomes the largest of all */
        low = bits < low ? bits : low;
    }
    *largest = high;
    *least = low;
}
