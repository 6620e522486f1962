/* A failure's sentence is one line of valid UTF-8, whatever name is in it and however long it is. */
#include "check.h"
#include "utils/status.h"

static colibri_message message;

static void test_the_sentence_is_written_and_the_status_returned(void)
{
    CHECK(fail(&message, COLIBRI_ERROR_FILE, "%s has %d", "x", 3) == COLIBRI_ERROR_FILE);
    CHECK(strcmp(message.text, "x has 3") == 0);
    CHECK(fail(NULL, COLIBRI_ERROR_MEMORY, "unread") == COLIBRI_ERROR_MEMORY);
}

static void test_a_long_sentence_is_cut_with_dots_between_characters(void)
{
    static char name[3 * COLIBRI_MESSAGE_SIZE];
    memset(name, 'a', sizeof name - 1);
    fail(&message, COLIBRI_ERROR_FILE, "%s", name);
    CHECK(strlen(message.text) == COLIBRI_MESSAGE_SIZE - 1);
    CHECK(strcmp(message.text + COLIBRI_MESSAGE_SIZE - 5, "a...") == 0);

    for (int shift = 0; shift < 4; shift++) { /* the cut falls on each byte of a four-byte character */
        char padding[5] = "xxxx";
        padding[shift] = '\0';
        for (size_t i = 0; i + 4 < sizeof name; i += 4)
            memcpy(name + i, "\xF0\x9F\x90\xA6", 5);
        fail(&message, COLIBRI_ERROR_FILE, "%s%s", padding, name);
        size_t n = strlen(message.text);
        CHECK(n <= COLIBRI_MESSAGE_SIZE - 1 && strcmp(message.text + n - 3, "...") == 0);
        CHECK((n - 3 - (size_t)shift) % 4 == 0 && strchr(message.text, '?') == NULL);
    }
}

static void test_control_characters_and_broken_utf8_become_question_marks(void)
{
    fail(&message, COLIBRI_ERROR_FILE, "a\nb\x1B[31m\x7F|\x80|\xC3|\xED\xA0\x80|\xC3\xA9");
    CHECK(strcmp(message.text, "a?b?[31m?|?|?|???|\xC3\xA9") == 0);
}

int main(void)
{
    RUN(test_the_sentence_is_written_and_the_status_returned);
    RUN(test_a_long_sentence_is_cut_with_dots_between_characters);
    RUN(test_control_characters_and_broken_utf8_become_question_marks);
    return 0;
}
