// The command that a run prints for resuming: how the program was called, with words quoted for a shell.
#include <gtest/gtest.h>

#include <array>

#include "llmc/train/command_line.h"

namespace llmc {
namespace {

TEST(CommandLine, WordsForAShell) {
    EXPECT_EQ(shell_word("runs/a-b_1.toml"), "runs/a-b_1.toml");
    EXPECT_EQ(shell_word("a run"), "'a run'");
    EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
    EXPECT_EQ(shell_word("$HOME;*"), "'$HOME;*'");
    EXPECT_EQ(shell_word(""), "''");
}

TEST(CommandLine, AsCalled) {
    constexpr std::array arguments = {"./train_gpt", "--steps", "3"};
    EXPECT_EQ(program_as_called(arguments, "", 0), "./train_gpt");
    EXPECT_EQ(program_as_called(arguments, "", 4), "mpirun -np 4 ./train_gpt");
    EXPECT_EQ(
        program_as_called(arguments, "scripts/launch.sh\n-np\n2\n--hostfile\n./train_gpt\n--steps\n3\n", 2),
        "scripts/launch.sh -np 2 --hostfile ./train_gpt");
    // A program in between (`nice`) starts this program with the arguments that follow.
    EXPECT_EQ(program_as_called(arguments, "scripts/launch.sh\n-np\n2\nnice\n./train_gpt\n--steps\n3\n", 2),
              "scripts/launch.sh -np 2 nice ./train_gpt");
}

TEST(CommandLine, AScriptInBetweenHidesWhatWasTyped) {
    constexpr std::array arguments = {"./train_gpt", "--steps", "3"};
    EXPECT_EQ(program_as_called(arguments, "scripts/launch.sh\n-np\n2\n./train.sh\n", 2),
              "mpirun -np 2 ./train_gpt");
    EXPECT_EQ(program_as_called(arguments, "scripts/launch.sh\n-np\n2\n./train.sh\nfast\nnow\n", 2),
              "mpirun -np 2 ./train_gpt");
}

}  // namespace
}  // namespace llmc
