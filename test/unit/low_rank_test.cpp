// A model with adapters as a description: its units, its counts, and what its passes cost.
#include "llmc/model/low_rank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/model/family.h"

namespace llmc {
namespace {

// SmolLM2 135M.
Model smollm2() {
    ModelChoices choices = choices_of("llama-tiny");
    for (const auto& [name, size] : {std::pair("layers", 30),
                                     {"heads", 9},
                                     {"kv-heads", 3},
                                     {"head-size", 64},
                                     {"channels", 576},
                                     {"mlp-size", 1536},
                                     {"seq-len", 128},
                                     {"vocab-size", 49152}})
        choices.values.find(name)->second = std::int64_t{size};
    choices.values.find("tied-head")->second = true;
    return make_model(family_of("llama-tiny"), choices);
}
const LowRank all{.rank = 16, .scale = 2, .matrices = {adaptable.begin(), adaptable.end()}};

TEST(LowRank, TrainsTheAdaptersAlone) {
    const Model base = smollm2(), adapted = with_adapters(base, all);
    EXPECT_EQ(count_parameters(base), 134515008);
    EXPECT_EQ(count_parameters(adapted), 134515008 + 4884480);
    EXPECT_EQ(count_parameters(adapted, true), 4884480);
    const Outline outline = outline_of(adapted);
    for (const Outline::OutlinedUnit& unit : outline.units)
        EXPECT_EQ(unit.spec.is_frozen(), !is_of_adapter(unit.spec.name)) << unit.spec.name;
    EXPECT_EQ(outline.unit(outline.part(3).units.at(1)).spec.name, "layers.2.lora");
    EXPECT_EQ(outline.files.name_in_file("layers.2.lora.self_attn.q_proj.lora_A.weight"),
              "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight");
}

// A product of n numbers takes 2n operations a token forward, as many for the gradient of its input, and as many for
// that of its matrix if that is trained. The embedding has no backward pass.
TEST(LowRank, CountsWhatIsComputed) {
    const Model base = smollm2(), adapted = with_adapters(base, all);
    const double trained = 4884480, frozen = 134515008 - 576 * (2 * 30 + 1);  // the norms are no products
    const double attention = 30.0 * 6 * 9 * 64 * 128;
    EXPECT_DOUBLE_EQ(training_flops_per_token(adapted), 4 * frozen + 6 * trained + attention);
    EXPECT_DOUBLE_EQ(training_flops_per_token(base), 6 * frozen + attention);
    EXPECT_EQ(backward_cost(adapted.runs.front().parts.front()), 0);
    EXPECT_EQ(weight_cost(adapted.runs.back().parts.front()), 0);
    EXPECT_DOUBLE_EQ(weight_cost(adapted.runs[1].parts.front()), 2 * trained / 30);
}

// Only what an A reads is kept for it.
TEST(LowRank, KeepsTheInputsOfAdaptersAlone) {
    const auto kept = [](const std::vector<std::string>& matrices) {
        const Model model = with_adapters(smollm2(), {.rank = 16, .scale = 2, .matrices = matrices});
        Scratch scratch;
        std::set<std::string> names;
        for (const PartBuffer& buffer : derive_lists(model.runs[1].parts.front(), {}, scratch).kept)
            names.insert(buffer.name);
        return names;
    };
    EXPECT_TRUE(kept({"q", "down"}).contains("mlp.act"));
    EXPECT_FALSE(kept({"q"}).contains("mlp.act"));
    EXPECT_FALSE(kept({"down"}).contains("input_layernorm"));
    EXPECT_TRUE(kept({"v"}).contains("self_attn.qkv.lora_A"));
}

TEST(LowRank, MatricesIn4BitsAreUnitsOfTheirOwn) {
    const Model model = with_nf4(with_adapters(smollm2(), all), 3);
    const Outline outline = outline_of(model);
    std::vector<std::string> names;
    for (const int unit : outline.part(1).units) names.push_back(outline.unit(unit).spec.name);
    EXPECT_EQ(names, (std::vector<std::string>{"layers.0", "layers.0.nf4", "layers.0.lora"}));
    // 0.5625 bytes for each number of the layers' matrices.
    const double matrices = 134515008 - 576 * (2 * 30 + 1) - 49152 * 576,
                 others = 134515008 + 4884480 - matrices;
    EXPECT_DOUBLE_EQ(parameter_bytes_about(model, DType::bf16), 0.5625 * matrices + 2 * others);
    EXPECT_EQ(outline.files.name_in_file("layers.0.nf4.mlp.up_proj.weight"),
              "model.layers.0.mlp.up_proj.weight");
    // 576 columns of o_proj in 6 parts are 96, and no whole blocks.
    EXPECT_THROW(with_nf4(with_adapters(smollm2(), all), 6), UserError);
}

TEST(LowRank, AFamilyWithoutTheMatricesIsRefused) {
    for (const char* const name : {"tiny", "nanochat-tiny"})
        EXPECT_THROW(with_adapters(make_model(family_of(name), choices_of(name)), all), UserError) << name;
}

}  // namespace
}  // namespace llmc
