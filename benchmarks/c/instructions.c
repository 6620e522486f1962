/* instructions.c: the engine at capture "none", one thread, for a tool that counts instructions.
 *
 *   instructions MODEL TOKENS CHUNK
 *
 * Feeds the ids 0 to TOKENS - 1, CHUNK at a time, and prints the code path in force. Uses the public header only; what is to be
 * counted is colibri_session_feed. */
#include <stdio.h>
#include <stdlib.h>

#include "colibri.h"

enum { MAX_TOKENS = 256 };

int main(int argc, char **argv) {
    static int32_t ids[MAX_TOKENS];
    static const char *const capture[] = {"none"};
    colibri_message message = {"three arguments, at most 256 tokens"};
    const int64_t tokens = argc == 4 ? atol(argv[2]) : 0, chunk = argc == 4 ? atol(argv[3]) : 0;
    colibri_status status = tokens < 1 || tokens > MAX_TOKENS || chunk < 1 ? COLIBRI_ERROR_ARGUMENT : COLIBRI_OK;
    colibri_model *model = NULL;
    colibri_session *session = NULL;
    const colibri_session_options options = {
        .size = sizeof options, .capture = capture, .n_capture = 1, .max_tokens = tokens, .threads = 1};
    for (int32_t i = 0; i < MAX_TOKENS; i++) ids[i] = i;
    if (status == COLIBRI_OK) status = colibri_model_open(argv[1], &model, &message);
    if (status == COLIBRI_OK) status = colibri_session_create(model, &options, &session, &message);
    for (int64_t done = 0; status == COLIBRI_OK && done < tokens; done += chunk) {
        const int64_t n = tokens - done < chunk ? tokens - done : chunk;
        status = colibri_session_feed(session, ids + done, n, NULL, NULL, &message);
    }
    if (status == COLIBRI_OK) puts(colibri_isa());
    else fprintf(stderr, "instructions MODEL TOKENS CHUNK: %s\n", message.text);
    colibri_session_release(session);
    colibri_model_release(model);
    return status != COLIBRI_OK;
}
