// How this program was called, for the commands that it prints for a person to type.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace llmc {

// A word as a shell takes it: in quotation marks where it needs them.
std::string shell_word(std::string_view word);

// What was typed to start the program, up to its name, for a shell: "./train_gpt", "mpirun -np 2 ./train_gpt",
// "scripts/launch.sh -np 2 ./train_gpt".
//   arguments  argv
//   launched   the command line of scripts/launch.sh (in TRAIN_GPT_LAUNCHED) or mpirun, a quoted word a line; empty
//              without them
//   processes  of mpirun; 0 without it
std::string program_as_called(std::span<const char* const> arguments, std::string_view launched,
                              int processes);

// The same of this process.
std::string program_as_called(std::span<const char* const> arguments);

}  // namespace llmc
