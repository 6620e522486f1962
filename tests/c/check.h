/* check.h: plain asserts for the C tests. A failed check prints its place and ends the test program with 1.
 *
 *     CHECK(1 + 1 == 2);
 *     CHECK_OK(call(..., &message), message);             the call returned COLIBRI_OK, else its sentence is printed
 *     CHECK_MESSAGE_HAS(message, "experts.3");            the sentence contains the text
 */
#ifndef COLIBRI_TESTS_CHECK_H
#define COLIBRI_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: %s: CHECK(%s) failed\n", __FILE__, __LINE__, __func__, #condition); \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

#define CHECK_OK(call, message)                                                                                                  \
    do {                                                                                                                         \
        int check_status = (int)(call);                                                                                          \
        if (check_status != 0) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s: %s gave status %d: %s\n", __FILE__, __LINE__, __func__, #call, check_status,             \
                    (message).text);                                                                                             \
            exit(1);                                                                                                             \
        }                                                                                                                        \
    } while (0)

#define CHECK_MESSAGE_HAS(message, piece)                                                                                        \
    do {                                                                                                                         \
        if (strstr((message).text, (piece)) == NULL) {                                                                           \
            fprintf(stderr, "%s:%d: %s: \"%s\" is not in the message \"%s\"\n", __FILE__, __LINE__, __func__, (piece),           \
                    (message).text);                                                                                             \
            exit(1);                                                                                                             \
        }                                                                                                                        \
    } while (0)

/* Runs one test function and says so: RUN(test_C2_two_tensors_may_not_claim_the_same_bytes); */
#define RUN(test)                  \
    do {                           \
        test();                    \
        printf("ok %s\n", #test);  \
    } while (0)

#endif
