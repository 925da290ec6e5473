// Options that the program no longer has: each is refused with its successor, wherever it is given.
#include "llmc/train/options.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

constexpr std::array<RemovedOption, 2> some_removed{
    {{"learning-rate", "0.2", "--lr"}, {"bf16", "0.3", "--dtype bf16"}}};

std::string refusal(std::vector<const char*> words, std::span<const RemovedOption> removed = some_removed) {
    words.insert(words.begin(), "train_gpt");
    std::string text;
    try {
        parse_options(static_cast<int>(words.size()), words.data(), text, removed);
    } catch (const UserError& error) {
        return error.what();
    }
    return text;
}

std::string refusal_of_file(const std::string& text, std::span<const RemovedOption> removed = some_removed) {
    const fs::path path = fs::temp_directory_path() / ("llmc_options_test_" + std::to_string(getpid()));
    write_file(path, text);
    std::string message = refusal({"--config", path.c_str()}, removed);
    fs::remove(path);
    const std::size_t at = message.find(path.string());
    return at == 0 ? "FILE" + message.substr(path.string().size()) : message;
}

TEST(RemovedOptions, AreRefusedWithTheirSuccessorOnTheCommandLine) {
    EXPECT_EQ(refusal({"--learning-rate=3"}), "--learning-rate was removed in 0.2: use --lr");
    EXPECT_EQ(refusal({"--learning-rate", "3"}), "--learning-rate was removed in 0.2: use --lr");
    EXPECT_EQ(refusal({"--steps=3", "--bf16"}), "--bf16 was removed in 0.3: use --dtype bf16");
    EXPECT_EQ(refusal({"--lr=3"}), "");
}

TEST(RemovedOptions, AreRefusedWithTheirSuccessorInAConfiguration) {
    EXPECT_EQ(refusal_of_file("steps = 4\nlearning-rate = 3\n"),
              "FILE, line 2: --learning-rate was removed in 0.2: use --lr");
    EXPECT_EQ(refusal_of_file("bf16 = true\n"), "FILE, line 1: --bf16 was removed in 0.3: use --dtype bf16");
    EXPECT_EQ(refusal_of_file("lr = 3\n"), "");
}

// CLI11 takes the next argument for the value of "--name=".
TEST(EmptyValues, AreNotTakenFromTheNextArgument) {
    EXPECT_EQ(refusal({"--out-dir=", "--overwrite"}),
              "--out-dir: the value is empty; give a value, or leave the option out");
    EXPECT_EQ(refusal({"--config=", "--quiet"}),
              "--config: the file's name is empty; give a name, or leave the option out");
    EXPECT_EQ(refusal({"--prompt=", "--steps=1"}), "");
}

TEST(RemovedOptions, OthersAreUnknown) {
    EXPECT_EQ(refusal({"--learning-rates=3"}).substr(0, 32), "unknown option --learning-rates;");
    EXPECT_EQ(refusal({"--learning-rate=3"}, {}).substr(0, 31), "unknown option --learning-rate;");
    EXPECT_EQ(refusal_of_file("learning-rate = 3\n", {}).substr(0, 29), "FILE, line 1: unknown setting");
}

TEST(RemovedOptions, AreGoneAndTheirSuccessorsExist) {
    const std::string help = refusal({"--help"});
    for (const RemovedOption& option : removed_options()) {
        EXPECT_EQ(help.find("--" + std::string(option.name) + " "), std::string::npos) << option.name;
        const std::string successor(option.successor.substr(0, option.successor.find(' ')));
        EXPECT_NE(help.find(successor + " "), std::string::npos) << successor;
    }
}

}  // namespace
}  // namespace llmc
