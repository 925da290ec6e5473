// How this program was called. The commands that it prints for the user start in the same way.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

// A command that a person may want next, and what it does: "go on with".
struct Suggestion {
    std::string purpose, command;
};
// The commands to suggest after a run. The first one resumes a stopped run, or continues a finished one to
// twice as many steps at the last learning rate. (An evaluation has no such command.) After a finished run,
// others generate text and draw the loss. Empty without a checkpoint.
std::vector<Suggestion> suggestions(const PreparedRun& run, const Outcome& outcome);
// The command that exports a checkpoint; empty without one.
std::string command_to_export(const PreparedRun& run, const std::filesystem::path& checkpoint);

}  // namespace llmc
