// How this program was called. The commands that it prints for the user start in the same way.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace llmc {

// A word for a shell, in quotation marks if it needs them.
std::string shell_word(std::string_view word);

// The command that started the program, up to its name: "./train_gpt", "mpirun -np 2 ./train_gpt",
// "scripts/launch.sh -np 2 ./train_gpt".
//   arguments  argv
//   launched   the command line of scripts/launch.sh (in TRAIN_GPT_LAUNCHED) or mpirun, one quoted word per line;
//              empty without a launcher
//   processes  the number that mpirun started; 0 without mpirun
std::string program_as_called(std::span<const char* const> arguments, std::string_view launched,
                              int processes);

// The same, for this process.
std::string program_as_called(std::span<const char* const> arguments);

struct PreparedRun;
struct Outcome;

// The command that resumes a stopped run, or continues a finished one to twice as many steps. Empty without a
// checkpoint.
std::string command_to_go_on(const PreparedRun& run, const Outcome& outcome);
// The command that exports a checkpoint; empty without one.
std::string command_to_export(const PreparedRun& run, const std::filesystem::path& checkpoint);

}  // namespace llmc
