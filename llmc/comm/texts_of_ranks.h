// Texts that one rank has and all ranks need, and errors that end all ranks together. One rank alone does not
// communicate.
#pragma once

#include <functional>
#include <string>

#include "llmc/comm/communicator.h"

namespace llmc {

// The text of rank `root`, on all ranks. All ranks call it.
std::string broadcast_text(Communicator& ranks, std::string own, int root);

// Calls f on each rank. If it throws a UserError on any, all ranks throw that of the first such rank, as a SharedError.
// All ranks call it.
void together(Communicator& ranks, const std::function<void()>& f);

// The text that f makes on rank 0, on all ranks; or its UserError on all.
std::string text_of_root(Communicator& ranks, const std::function<std::string()>& f);

}  // namespace llmc
