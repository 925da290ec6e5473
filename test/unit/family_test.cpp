// A family other than GPT-2: the choices that a user can make, and what is refused.
#include "llmc/model/family.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
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
    made.runs[2].count = choices.size("layers") / 4;
    made.runs.erase(made.runs.begin() + 4);
    return made;
}

const RegisteredFamily registered(
    {.name = "strange",
     .options = {{"turns", "Of layers", OptionKind::division},
                 {"layers", "Layers"},
                 {"seq-len", "Context"},
                 {"vocab-size", "Vocabulary"},
                 {"window", "Window", OptionKind::count, std::int64_t{0}},
                 {"theta", "Base of the angles", OptionKind::number, 1e4},
                 {"scaling", "Scaling of the angles", OptionKind::text, std::string("none"), "HOW"},
                 {"inverse", "Turn the other way", OptionKind::on_off, false}},
     .models = {{"strange-tiny", {4, 8, strange::tokens, strange::vocabulary}, 1e-3},
                {"strange-far",
                 {4, 8, strange::tokens, strange::vocabulary},
                 1e-3,
                 {{"theta", 5e5}, {"inverse", true}}}},
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

TEST(Family, ItsOptionsHaveTypesAndTheModelsDefaults) {
    const auto choices = [](const std::vector<const char*>& words) {
        return parsed(words).choices_of_model();
    };
    const ModelChoices tiny = choices({"--model=strange-tiny"}), far = choices({"--model=strange-far"});
    EXPECT_EQ(tiny, choices_of("strange-tiny"));
    EXPECT_EQ(tiny.size("window"), 0);
    EXPECT_EQ(tiny.number("theta"), 1e4);
    EXPECT_EQ(tiny.text("scaling"), "none");
    EXPECT_FALSE(tiny.is_on("inverse"));
    EXPECT_EQ(far.number("theta"), 5e5);
    EXPECT_TRUE(far.is_on("inverse"));
    EXPECT_EQ(parsed({"--model=strange-far"}).make_model().description, "strange-far: a strange model");
    const ModelChoices given =
        choices({"--model=strange-far", "--theta=2.5", "--scaling=yarn", "--window=7", "--inverse=false"});
    EXPECT_EQ(given.size("window"), 7);
    EXPECT_EQ(given.number("theta"), 2.5);
    EXPECT_EQ(given.text("scaling"), "yarn");
    EXPECT_FALSE(given.is_on("inverse"));
    EXPECT_TRUE(choices({"--model=strange-tiny", "--inverse"}).is_on("inverse"));
    EXPECT_EQ(parsed({"--model=strange-tiny", "--theta=5e5", "--inverse"}).make_model().description,
              "strange-far: a strange model");
}

TEST(Family, RefusesValuesOfAnotherTypeOrRange) {
    EXPECT_EQ(refusal({"--model=strange-tiny", "--theta=x"}),
              "--theta: 'x' is not a number; give a number such as 0.001");
    EXPECT_EQ(refusal({"--model=strange-tiny", "--theta=-1"}), "--theta -1 is out of range; give 0 or more");
    EXPECT_EQ(refusal({"--model=strange-tiny", "--theta=nan"}),
              "--theta nan is out of range; give 0 or more");
    EXPECT_EQ(refusal({"--model=strange-tiny", "--window=-1"}),
              "--window -1 is out of range; give 0 or more");
    EXPECT_EQ(refusal({"--model=strange-tiny", "--inverse=2"}),
              "--inverse: '2' is neither true nor false; give true or false");
    EXPECT_EQ(refusal({"--model=tiny", "--scaling=none"}),
              "--scaling is not an option of --model tiny; leave it out");
    EXPECT_EQ(refusal({"--model=tiny", "--inverse=false"}),
              "--inverse is not an option of --model tiny; leave it out");
}

TEST(Family, ARecordKeepsTheTypes) {
    const Options options = parsed({"--model=strange-far", "--scaling=yarn"});
    const auto json = to_json(options);
    EXPECT_EQ(json["theta"], 5e5);
    EXPECT_EQ(json["scaling"], "yarn");
    EXPECT_EQ(json["inverse"], true);
    EXPECT_EQ(json["bias"], nullptr);
    const std::string toml = to_toml(options);
    EXPECT_NE(toml.find("\nscaling = \"yarn\"\n"), std::string::npos) << toml;
    EXPECT_NE(toml.find("\n# inverse = true\n"), std::string::npos) << toml;
    EXPECT_EQ(toml.find("bias"), std::string::npos) << toml;

    CheckpointInfo checkpoint;
    checkpoint.configuration = json.dump();
    Options resumed;
    EXPECT_TRUE(take_model(resumed, checkpoint));
    EXPECT_EQ(resumed.model, "strange-far");
    EXPECT_EQ(std::get<std::optional<double>>(resumed.model_options.at("theta")), 5e5);
    EXPECT_EQ(std::get<std::optional<std::string>>(resumed.model_options.at("scaling")), "yarn");
    EXPECT_EQ(std::get<std::optional<bool>>(resumed.model_options.at("inverse")), true);
    EXPECT_EQ(std::get<std::optional<bool>>(resumed.model_options.at("bias")), std::nullopt);
}

TEST(Family, AnOptionIsOfOneKindInAllFamilies) {
    try {
        const RegisteredFamily another({.name = "another",
                                        .options = {{"layers", "Layers"},
                                                    {"seq-len", "Context"},
                                                    {"vocab-size", "Vocabulary"},
                                                    {"bias", "Biases", OptionKind::text, std::string("all")}},
                                        .models = {},
                                        .make = make});
        FAIL();
    } catch (const ProgrammingError& error) {
        EXPECT_NE(
            std::string(error.what()).find("option bias of family another is of another kind elsewhere"),
            std::string::npos);
    }
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
    // A checkpoint that does not name a switch has the model's default.
    EXPECT_EQ(says(R"({"model": "gpt2"})", "--bias=false"),
              "c has another model, with --bias=true; leave out --bias=false");
    EXPECT_EQ(says(R"({"model": "gpt2", "bias": false})", "--model=tiny"),
              "c has another model, with --bias=false; give --bias=false");
}

}  // namespace
}  // namespace llmc
