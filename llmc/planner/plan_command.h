// The commands that answer in one process, without starting or joining others: `./train_gpt plan`, `configure`, which
// asks for the options of a plan, and the options that print what a run would do.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llmc/train/console.h"
#include "llmc/train/session.h"

namespace llmc {

// Performs the command line if it is one of these, and returns the exit status. Otherwise nothing. The processes of a
// job that print first compare their options, and then call print_in_job().
std::optional<int> plan_command(int argc, const char* const* argv);

// --print-model, --print-step, and --pipeline-timeline with --steps 0 (print_command.cpp). False for another command
// line.
bool print_instead_of_run(Console& console, const std::vector<std::string>& arguments);

// The same in a job, for all its ranks: rank 0 prints.
void print_in_job(Session& session);

}  // namespace llmc
