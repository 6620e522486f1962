/* utf8.h: which bytes are one well-formed UTF-8 character (no overlong form, no surrogate, at most U+10FFFF). */
#ifndef COLIBRI_UTF8_H
#define COLIBRI_UTF8_H

#include <stddef.h>

/* Length of the sequence that starts at s, where n >= 1 bytes remain; 0 when it is none. */
static inline size_t utf8_sequence(const unsigned char *s, size_t n)
{
    static const unsigned lowest[5] = {0, 0, 0x80, 0x800, 0x10000}; /* shorter codes for smaller points are refused */
    size_t length = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 0;
    if (length <= 1 || length > n)
        return length > n ? 0 : length;
    unsigned point = s[0] & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        point = point << 6 | (s[i] & 0x3Fu);
    }
    return point < lowest[length] || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000) ? 0 : length;
}

#endif
