// --chat: a conversation with the model in the terminal, or over a pipe. Each line of standard input is a message;
// standard output has the answers only, and all else goes to standard error.
#pragma once

#include "llmc/train/options.h"

namespace llmc {

struct PreparedRun;

// UserError for several processes, and for a model without a tokenizer or a chat format.
void check_chat(const PreparedRun& run);

// Answers until the input ends, /quit, or a signal while no answer is being made. A signal during an answer ends that
// answer; a second one ends the process.
void chat(PreparedRun& run);

}  // namespace llmc
