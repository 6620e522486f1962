/* status.c: one sentence per failure, always valid UTF-8 on one line whatever a file's names contain. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Length of the well-formed UTF-8 sequence at s (n bytes remain), or 0. */
static size_t utf8_sequence(const unsigned char *s, size_t n)
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

colibri_status fail(colibri_message *message, colibri_status status, const char *format, ...)
{
    if (message == NULL)
        return status;
    va_list arguments;
    va_start(arguments, format);
    int wanted = vsnprintf(message->text, sizeof message->text, format, arguments);
    va_end(arguments);
    if (wanted < 0)
        message->text[0] = '\0';

    /* A cut may fall inside a character, and a name may hold control characters or no UTF-8 at all. */
    unsigned char *text = (unsigned char *)message->text;
    size_t n = strlen(message->text);
    bool cut = wanted >= (int)sizeof message->text;
    size_t end = cut ? n - 3 : n;
    for (size_t i = 0; i < end;) {
        size_t length = utf8_sequence(text + i, n - i);
        if (cut && i + length > end) {
            end = i;
            break;
        }
        if (length == 0 || text[i] < 0x20 || text[i] == 0x7F) {
            text[i] = '?';
            length = 1;
        }
        i += length;
    }
    if (cut)
        memcpy(text + end, "...", 4);
    return status;
}
