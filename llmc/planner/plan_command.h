// The command `./train_gpt plan`, which answers in one process, without starting or joining others.
#pragma once

#include <optional>

namespace llmc {

// Performs the command line if it is the planner's: prints the plan and returns the exit status. Otherwise nothing.
std::optional<int> plan_command(int argc, const char* const* argv);

}  // namespace llmc
