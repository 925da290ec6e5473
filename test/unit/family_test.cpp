// A family other than GPT-2: the choices that a user can make, and what is refused.
#include "llmc/model/family.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/train/options.h"
#include "llmc/train/resume.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

// The strange family's layers, repeated as often as the user chooses.
Model make(const ModelChoices& choices) {
    check_divides("turns", "layers", choices);
    Model made = strange::model();
    made.runs[2].count = choices.at("layers") / 4;
    made.runs.erase(made.runs.begin() + 4);
    return made;
}

const RegisteredFamily registered(
    {.name = "strange",
     .options = {{"turns", "Of layers", OptionKind::division},
                 {"layers", "Layers"},
                 {"seq-len", "Context"},
                 {"vocab-size", "Vocabulary"}},
     .models = {{"strange-tiny", {4, 8, strange::tokens, strange::vocabulary}, 1e-3}},
     .make = make});

Options parsed(std::vector<const char*> words) {
    words.insert(words.begin(), "train_gpt");
    std::string text;
    return *parse_options(static_cast<int>(words.size()), words.data(), text);
}

std::string refusal(const std::vector<const char*>& words) {
    try {
        parsed(words).make_model();
    } catch (const UserError& error) {
        return error.what();
    }
    return "";
}

TEST(Family, ItsModelsAreKnownByTheirNames) {
    const Model model = parsed({"--model=strange-tiny"}).make_model();
    EXPECT_EQ(model.description, "strange-tiny: a strange model");
    EXPECT_EQ(model.layers(), 8);
    EXPECT_EQ(parsed({"--model=strange-tiny", "--layers=12"}).make_model().description, "a strange model");
    EXPECT_EQ(parsed({"--model=tiny"}).make_model().description.substr(0, 6), "tiny: ");
}

TEST(Family, RefusesWhatIsAnotherOnes) {
    EXPECT_EQ(refusal({"--model=strange-tiny", "--bias=false"}),
              "--bias is not an option of --model strange-tiny; leave it out");
    EXPECT_EQ(refusal({"--model=strange-tiny", "--heads=2"}),
              "--heads is not an option of --model strange-tiny; leave it out");
    EXPECT_EQ(refusal({"--model=tiny", "--turns=2"}),
              "--turns is not an option of --model tiny; leave it out");
    EXPECT_EQ(refusal({"--model=strange-tiny", "--layers=9"}),
              "--turns 4 does not divide --layers 9; try --layers 8 or 12");
}

TEST(Family, HasTheOptionsThatOthersFollowFrom) {
    try {
        const RegisteredFamily lacking({.name = "short",
                                        .options = {{"layers", "Layers"}, {"seq-len", "Context"}},
                                        .models = {},
                                        .make = make});
        FAIL();
    } catch (const ProgrammingError& error) {
        EXPECT_NE(std::string(error.what()).find("family short has no option vocab-size"), std::string::npos);
    }
}

TEST(Family, MayHaveAnyNumberOfLayersInTurn) {
    const Model model = parsed({"--model=strange-tiny", "--layers=9223372036854775804"}).make_model();
    EXPECT_EQ(model.layers(), std::numeric_limits<std::int64_t>::max() - 3);
    EXPECT_GT(parameters_about(model), 0x1p63);
}

TEST(Family, ACheckpointOfAnotherIsRefused) {
    const auto says = [](const char* configuration, const char* option) -> std::string {
        CheckpointInfo checkpoint;
        checkpoint.directory = "c";
        checkpoint.configuration = configuration;
        try {
            differences(checkpoint, parsed({option}));
        } catch (const UserError& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_EQ(says(R"({"model": "strange-tiny"})", "--model=tiny"),
              "c belongs to --model strange-tiny, which is of another family than --model tiny; give --model "
              "strange-tiny");
    EXPECT_EQ(says(R"({"model": "gpt9"})", "--model=tiny"),
              "c has --model gpt9, which this program does not know; use the program that wrote it");
    EXPECT_EQ(says(R"({"model": "gpt2"})", "--model=tiny"), "");
}

}  // namespace
}  // namespace llmc
