// The model's units: names, shapes, layout, and initial weights.
#include "llmc/model/units.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/device/ops.h"
#include "llmc/model/family.h"
#include "llmc/model/operations.h"
#include "test/gpt2_units.h"

namespace llmc {
namespace {

constexpr GPTConfig odd{.layers = 2, .heads = 3, .channels = 15, .sequence_length = 7, .vocabulary = 37};

Model made(const NamedModel& named) { return make_model(family_of(named.name), choices_of(named.name)); }

TEST(Units, NamedModelsAreThePublishedOnes) {
    // Published values. Heads and learning rates are from GPT-3's paper (table 2.1); the heads of GPT-2's two
    // largest sizes are from its files. Counts of parameters are those published for GPT-2's four sizes.
    // GPT-3's 6.7B with GPT-2's vocabulary follows the formula (V + T) C + L (12 C^2 + 13 C) + 2 C.
    struct Published {
        std::int64_t heads, parameters;
        double learning_rate;
    };
    const std::map<std::string_view, Published> published = {{"gpt2", {12, 124'439'808, 6e-4}},
                                                             {"gpt2-medium", {16, 354'823'168, 3e-4}},
                                                             {"gpt2-large", {20, 774'030'080, 2.5e-4}},
                                                             {"gpt2-xl", {25, 1'557'611'200, 2e-4}},
                                                             {"gpt3-6.7b", {32, 6'658'404'352, 1.2e-4}}};
    std::size_t compared = 0;
    for (const NamedModel& model : family_of("gpt2").models) {
        const auto expected = published.find(model.name);
        if (expected == published.end()) continue;
        compared += 1;
        EXPECT_EQ(count_parameters(made(model)), expected->second.parameters) << model.name;
        EXPECT_EQ(choices_of(model.name).size("heads"), expected->second.heads) << model.name;
        EXPECT_EQ(model.learning_rate, expected->second.learning_rate) << model.name;
    }
    EXPECT_EQ(compared, published.size());
}

TEST(Units, TensorsAreAlignedAndDoNotOverlap) {
    for (UnitSpec& spec : gpt_units(odd)) {
        const UnitLayout unit(std::move(spec));
        std::int64_t end = 0;
        for (const UnitLayout::Entry& entry : unit.entries()) {
            EXPECT_EQ(entry.offset % 128, 0) << unit.full_name(entry.spec);
            EXPECT_GE(entry.offset, end);
            end = entry.offset + entry.stored.elements();
        }
        EXPECT_EQ(unit.elements(), end);
        for (const int ranks : {1, 2, 3, 8}) {
            EXPECT_GE(unit.padded_elements(ranks), unit.elements());
            EXPECT_EQ(unit.padded_elements(ranks) % (norm_block_elements * ranks), 0);
        }
    }
}

TEST(Units, TheVocabularyIsPaddedTo128Rows) {
    const UnitLayout wte(gpt_units(odd)[wte_unit]);
    EXPECT_EQ(wte.entries()[0].spec.shape, (Shape{37, 15}));
    EXPECT_EQ(wte.entries()[0].stored, (Shape{128, 15}));
}

// Together, ranks have each element of a shared tensor once. Each rank has all other tensors, in norm blocks
// of their own.
TEST(Units, RanksShareTensors) {
    constexpr GPTConfig config{
        .layers = 2, .heads = 6, .channels = 30, .sequence_length = 7, .vocabulary = 300};
    for (const int ranks : {2, 3, 6}) {
        for (const UnitSpec& spec : gpt_units(config)) {
            const UnitLayout first(spec, {0, ranks});
            for (std::size_t i = 0; i < first.entries().size(); ++i) {
                const ParamSpec& param = first.entries()[i].spec;
                std::vector<int> times(static_cast<std::size_t>(param.shape.elements()));
                for (int rank = 0; rank < ranks; ++rank) {
                    const UnitLayout unit(spec, {rank, ranks});
                    const UnitLayout::Entry& entry = unit.entries()[i];
                    EXPECT_EQ(unit.elements(), first.elements());
                    EXPECT_EQ(entry.offset, first.entries()[i].offset);
                    EXPECT_EQ(entry.stored, first.entries()[i].stored);
                    EXPECT_EQ(entry.offset >= unit.replicated_begin(), !param.tensor_dim) << param.name;
                    std::int64_t own = 0;
                    for (const TensorRun& run : runs_of(entry, unit.ranks())) {
                        EXPECT_EQ(run.own, own);
                        own += run.size;
                        for (std::int64_t k = 0; k < run.size; ++k)
                            ++times[static_cast<std::size_t>(run.whole + k)];
                    }
                    EXPECT_EQ(own, entry.shape.elements());
                    EXPECT_LE(own, entry.stored.elements());
                }
                for (const int count : times) EXPECT_EQ(count, param.tensor_dim ? 1 : ranks) << param.name;
            }
            EXPECT_EQ(first.replicated_begin() % norm_block_elements, 0);
        }
    }
}

// A rank's initial weights equal those of the whole tensor at the same places.
TEST(Units, RanksInitializeTheSameModel) {
    constexpr GPTConfig config{
        .layers = 1, .heads = 2, .channels = 20, .sequence_length = 7, .vocabulary = 130};
    for (const UnitSpec& spec : gpt_units(config)) {
        const UnitLayout whole(spec);
        std::vector<float> expected(static_cast<std::size_t>(whole.elements()));
        initialize_unit(expected, 0, whole, 3);
        for (int rank = 0; rank < 2; ++rank) {
            const UnitLayout unit(spec, {rank, 2});
            std::vector<float> values(static_cast<std::size_t>(unit.elements()));
            initialize_unit(values, 0, unit, 3);
            for (const UnitLayout::Entry& entry : unit.entries()) {
                const auto same = std::ranges::find_if(whole.entries(), [&](const UnitLayout::Entry& other) {
                    return other.spec.name == entry.spec.name;
                });
                for (const TensorRun& run : runs_of(entry, unit.ranks())) {
                    for (std::int64_t k = 0; k < run.size; ++k) {
                        EXPECT_EQ(values[static_cast<std::size_t>(entry.offset + run.own + k)],
                                  expected[static_cast<std::size_t>(same->offset + run.whole + k)]);
                    }
                }
            }
        }
    }
}

TEST(Units, MatricesDecayAndVectorsDoNot) {
    for (const UnitSpec& unit : gpt_units(odd)) {
        for (const ParamSpec& param : unit.params) {
            const bool vector =
                param.name.ends_with("bias") || unit.name == "ln_f" || param.name.starts_with("ln_");
            EXPECT_EQ(param.decays(), !vector) << unit.name << "." << param.name;
        }
    }
}

TEST(Units, ProjectionsIntoTheResidualStreamBeginSmaller) {
    // Two additions a block: the variance of their sum over the blocks is that of one ordinary product.
    const GPTConfig deep{.layers = 8, .heads = 2, .channels = 16, .sequence_length = 4, .vocabulary = 5};
    int matrices = 0;
    for (const UnitSpec& unit : gpt_units(deep)) {
        for (const ParamSpec& param : unit.params) {
            if (!param.decays()) continue;
            const bool projects = param.name.ends_with("c_proj.weight");
            EXPECT_DOUBLE_EQ(param.init.stddev, projects ? 0.02 / 4 : 0.02) << unit.name << "." << param.name;
            EXPECT_EQ(param.init.mean, 0.0);
            matrices += 1;
        }
    }
    EXPECT_EQ(matrices, 2 + 8 * 4);  // both embeddings, and four products a block
}

TEST(Units, AnUnknownTensorIsAFaultOfTheProgram) {
    std::vector<float> values(8);
    const UnitLayout ln_f(gpt_units(odd).back());
    std::vector<float> flat(static_cast<std::size_t>(ln_f.elements()));
    const Tensor tensor{reinterpret_cast<std::byte*>(flat.data()), DType::fp32, {ln_f.elements()}};
    EXPECT_THROW((void)ln_f.view(tensor, "gamma"), ProgrammingError);
}

std::vector<float> initial(const UnitLayout& unit, std::uint64_t seed, int ranks = 1) {
    std::vector<float> values(static_cast<std::size_t>(unit.padded_elements(ranks)), -1.0F);
    initialize_unit(values, 0, unit, seed);
    return values;
}

TEST(Init, DependsOnSeedAndNameOnly) {
    const GPTConfig config{.layers = 2, .heads = 2, .channels = 64, .sequence_length = 32, .vocabulary = 256};
    const std::vector<UnitSpec> units = gpt_units(config);
    const UnitLayout first(units[2]), second(units[3]);
    EXPECT_EQ(initial(first, 1), initial(first, 1));
    EXPECT_NE(initial(first, 1), initial(first, 2));
    EXPECT_NE(initial(first, 1), initial(second, 1));
    // Padding for more ranks only adds zeros at the end.
    std::vector<float> padded = initial(first, 1, 8);
    EXPECT_GT(padded.size(), static_cast<std::size_t>(first.elements()));
    EXPECT_TRUE(std::all_of(padded.begin() + first.elements(), padded.end(), [](float x) { return x == 0; }));
    padded.resize(static_cast<std::size_t>(first.padded_elements(1)));
    EXPECT_EQ(padded, initial(first, 1));
}

TEST(Init, HasGpt2sMoments) {
    const GPTConfig config{
        .layers = 2, .heads = 2, .channels = 128, .sequence_length = 32, .vocabulary = 200};
    const UnitLayout block(gpt_units(config)[2]);
    const std::vector<float> values = initial(block, 1);
    for (const UnitLayout::Entry& entry : block.entries()) {
        const auto* begin = values.data() + entry.offset;
        const auto n = static_cast<double>(entry.spec.shape.elements());
        double sum = 0, squares = 0;
        for (std::int64_t i = 0; i < entry.spec.shape.elements(); ++i) {
            sum += static_cast<double>(begin[i]);
            squares += static_cast<double>(begin[i]) * static_cast<double>(begin[i]);
        }
        const double sigma = entry.spec.init.stddev;
        // Five standard errors of the mean and of the variance of n normal numbers.
        EXPECT_NEAR(sum / n, entry.spec.init.mean, 5 * sigma / std::sqrt(n)) << entry.spec.name;
        if (sigma == 0) continue;
        EXPECT_NEAR(squares / n, sigma * sigma, 5 * sigma * sigma * std::sqrt(2 / n)) << entry.spec.name;
    }
}

TEST(Init, LeavesThePaddedVocabularyZero) {
    const UnitLayout wte(gpt_units(odd)[wte_unit]);
    const std::vector<float> values = initial(wte, 1);
    const auto true_elements = static_cast<std::size_t>(37 * 15);
    EXPECT_NE(values[true_elements - 1], 0);
    EXPECT_TRUE(std::all_of(values.begin() + true_elements, values.end(), [](float x) { return x == 0; }));
}

// If an operand is divided in an inner dimension, ranks would have other columns of the matrix than of the
// operand.
TEST(Traces, RefuseAProductOfWhatIsDividedInAnInnerDimension) {
    Trace t("part", "unit", 7, 16);
    const int x = product(t, "a", gather(t, t.input()), {2, 8}, by_outputs(1, "channels"), false, {});
    try {
        product(t, "b", x, {16}, by_inputs(), false, {});
        ADD_FAILURE() << "accepted";
    } catch (const ProgrammingError& error) {
        EXPECT_NE(std::string(error.what())
                      .find("part: product b needs an input that is divided in dimension 1, but a is divided "
                            "in dimension 2"),
                  std::string::npos)
            << error.what();
    }
}

TEST(Config, RefusesHeadsThatDoNotDivide) {
    try {
        family_of("gpt2").make({{{"layers", std::int64_t{1}},
                                 {"heads", std::int64_t{12}},
                                 {"channels", std::int64_t{800}},
                                 {"seq-len", std::int64_t{8}},
                                 {"vocab-size", std::int64_t{256}},
                                 {"bias", true},
                                 {"tied-head", true}}});
        ADD_FAILURE() << "accepted";
    } catch (const UserError& error) {
        EXPECT_STREQ(error.what(), "--heads 12 does not divide --channels 800; try --channels 792 or 804");
    }
}

}  // namespace
}  // namespace llmc
