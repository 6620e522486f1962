/* status.c: one sentence per failure, always valid UTF-8 on one line whatever a file's names contain. */
#include "status.h"

#include "utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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
