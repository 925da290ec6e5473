// `./train_gpt configure`: asks what a run is to be, and makes the command line of a plan from the answers.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "llmc/train/console.h"

namespace llmc {

// The arguments of `plan`, without that word: on GPUs with a search for the best mesh. A question whose answer is wrong
// is asked again. UserError if the input ends before the last question.
std::vector<std::string> ask_for_plan(const std::string& program, std::istream& answers, Console& console);

}  // namespace llmc
