// The parts of families other than GPT-2: which meshes they suit, where joined parameters lie, which gradients
// ranks sum, and what the lists of ranks that share key heads do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/model/operations.h"
#include "llmc/model/part_lists.h"
#include "llmc/parallel/mesh.h"
#include "test/gpt2_config.h"
#include "test/unit/programming_fault.h"

namespace llmc {
namespace {

using Changes = std::vector<std::pair<std::string, ModelValue>>;

Model llama(std::int64_t heads, std::int64_t kv_heads, Changes changes = {}) {
    const std::initializer_list<std::pair<const char*, std::int64_t>> sizes = {
        {"layers", 2},    {"heads", heads}, {"kv-heads", kv_heads}, {"channels", 14},
        {"head-size", 6}, {"seq-len", 12},  {"mlp-size", 12},       {"vocab-size", 37}};
    for (const auto& [option, size] : sizes) changes.emplace_back(option, size);
    return model_with("llama-tiny", changes);
}

std::string refusal(std::int64_t ranks, const Model& model) {
    try {
        check_mesh_sizes({.tensor = ranks}, model);
        return "";
    } catch (const UserError& error) {
        return error.what();
    }
}

// Ranks divide the key heads, or several neighbors share each.
TEST(Families, SuitRanksThatShareKeyHeads) {
    const Model six = llama(6, 3);
    for (const std::int64_t ranks : {1, 3, 6}) EXPECT_EQ(refusal(ranks, six), "") << ranks;
    EXPECT_EQ(refusal(4, six), "--tensor-parallel 4 does not divide the 6 heads (--heads); try 1, 3, 6");
    EXPECT_EQ(refusal(2, six),
              "--tensor-parallel 2 does not divide the 3 heads of keys (--kv-heads), nor is it a multiple; "
              "try 1, 3, 6");
    // A norm over all key heads needs ranks that divide them.
    const Changes all = {{"qk-norm", std::string("all")}};
    EXPECT_EQ(refusal(3, llama(6, 3, all)), "");
    EXPECT_EQ(refusal(6, llama(6, 3, all)),
              "--tensor-parallel 6 does not divide the 3 heads of keys (--kv-heads); try 1, 3");
}

UnitSpec layer_of(const Model& model) {
    const Outline outline = outline_of(model);
    const auto unit = std::ranges::find_if(
        outline.units, [](const auto& one) { return one.spec.name.starts_with("layers."); });
    return unit->spec;
}

// No matrix or bias of these has a multiple of 128 elements, at which other tensors begin.
TEST(Families, HaveJoinedParametersWithoutGaps) {
    const Model model = llama(4, 2, {{"qkv-bias", true}});
    for (const int ranks : {1, 2, 4}) {
        const UnitLayout layout(layer_of(model), {ranks - 1, ranks});
        const auto end = [&](const std::string& name) {
            const UnitLayout::Entry& entry = layout.entry(name);
            return entry.offset + entry.stored.elements();
        };
        for (const std::string kind : {".weight", ".bias"}) {
            const std::string q = "self_attn.q_proj" + kind, k = "self_attn.k_proj" + kind,
                              v = "self_attn.v_proj" + kind;
            // Four ranks have whole keys and values; their queries lie among the divided tensors.
            const bool has_whole_keys = ranks == 4;
            EXPECT_EQ(layout.entry(q).offset % 128, 0);
            if (has_whole_keys) {
                EXPECT_EQ(layout.entry(k).offset % 128, 0);
            } else {
                EXPECT_EQ(layout.entry(k).offset, end(q));
            }
            EXPECT_EQ(layout.entry(v).offset, end(k));
            EXPECT_EQ(layout.entry(k).offset >= layout.replicated_begin() && ranks > 1, has_whole_keys);
            EXPECT_NE(end(q) % 128, 0);
        }
        EXPECT_EQ(layout.entry("mlp.up_proj.weight").offset, end("mlp.gate_proj.weight"));
    }
}

// With more ranks than key heads, each rank has whole key matrices, but makes the gradient of its own head
// only. Norms of heads are whole on all ranks, and their gradients come from each rank's heads.
TEST(Families, SumTheGradientsThatRanksMakeInPart) {
    const auto sums = [](const Model& model, const TensorSplit& split, const std::string& name) {
        const Part& part = model.runs[1].parts[0];
        for (int i = 0; i < std::ssize(part.parameters); ++i) {
            if (part.parameters[static_cast<std::size_t>(i)].spec.name == name)
                return partial_gradient(part, i)(split);
        }
        ADD_FAILURE() << "no parameter " << name;
        return false;
    };
    const Model model = llama(4, 2, {{"qk-norm", std::string("head")}, {"qkv-bias", true}});
    for (const char* const name : {"self_attn.k_proj.weight", "self_attn.v_proj.bias"}) {
        EXPECT_FALSE(sums(model, {2, true}, name)) << name;
        EXPECT_TRUE(sums(model, {4, false}, name)) << name;
    }
    for (const char* const name : {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}) {
        EXPECT_FALSE(sums(model, {1, false}, name)) << name;
        EXPECT_TRUE(sums(model, {2, false}, name)) << name;
        EXPECT_TRUE(sums(model, {4, true}, name)) << name;
    }
    EXPECT_FALSE(sums(model, {4, false}, "input_layernorm.weight"));
    EXPECT_TRUE(sums(model, {4, true}, "input_layernorm.weight"));
    EXPECT_FALSE(sums(model, {4, true}, "self_attn.q_proj.weight"));
    // A norm over all heads has a weight for each, which ranks divide.
    const Model over_all = llama(4, 4, {{"qk-norm", std::string("all")}});
    EXPECT_FALSE(sums(over_all, {4, true}, "self_attn.k_norm.weight"));
}

// A product knows the shape of its matrix in both halves of the backward pass. The matrix may be a copy of the
// rows of a rank's own key head.
TEST(Families, KnowTheShapeOfCopiedRowsInBothHalves) {
    Scratch scratch;
    const Part part = llama(4, 2).runs[1].parts[0];
    const PartLists lists = derive_lists(part, {.split = {.ranks = 4}}, scratch);
    for (const List* list : {&lists.backward_input, &lists.backward_weight}) {
        const auto product = std::ranges::find_if(*list, [](const ListCall& call) {
            return call.name == "matmul_backward" && call.node->name == "self_attn.qkv";
        });
        ASSERT_NE(product, list->end());
        EXPECT_EQ(product->operands[5].shape, (Shape{18, 14}));  // 3 heads of 6
    }
}

TEST(Families, AskForTheWidestWindow) {
    const Part wide = llama(4, 2).runs[1].parts[0],
               narrow = llama(4, 2, {{"window", std::int64_t{8}}}).runs[1].parts[0];
    const auto window = [](const std::vector<Part>& parts) {
        Model model = llama(4, 2);
        model.runs[1].parts = parts;
        return workspace_request(model, {}).window;
    };
    EXPECT_EQ(window({narrow}), 8);
    EXPECT_EQ(window({narrow, wide}), 0);
    EXPECT_EQ(window({wide, narrow}), 0);
    const Part narrower = llama(4, 2, {{"window", std::int64_t{5}}}).runs[1].parts[0];
    EXPECT_EQ(window({narrower, narrow}), 8);
}

// A single piece of six heads is not two queries, two keys and two values: of two ranks, the first would have
// both queries.
TEST(Families, RefuseHeadsThatRanksDivideOtherwise) {
    Trace t("part", "unit", 7, 16);
    const int heads = product(t, "six", gather(t, t.input()), {6, 4}, by_outputs(0, "heads"), false, {});
    const char* const why = "needs 2, 2, 2 heads side by side, but ranks divide six otherwise";
    const HeadCounts counts{2, 2};
    expect_fault([&] { attention(t, "attn", heads, counts); }, std::string("attention attn ") + why);
    expect_fault(
        [&] {
            head_norm(t, heads, counts, {"q", "k", false, 0});
        },
        std::string("head_norm q ") + why);
    expect_fault([&] { rope(t, heads, counts, {7, 4, 10}); }, std::string("rope six ") + why);
}

// Each rank has its share of every piece, which is not a range of the columns of one matrix.
TEST(Families, RefuseAProductByInputsOfSeveralPieces) {
    Trace t("part", "unit", 7, 16);
    const Piece channels{8, "channels"};
    const int both =
        packed_product(t, "both", gather(t, t.input()), {{"a", channels}, {"b", channels}}, {}, false, {});
    expect_fault([&] { product(t, "down", relu_squared(t, "act", both), {16}, by_inputs(), false, {}); },
                 "product down needs an input that ranks divide as one, but act.act has several pieces");
    const int shared =
        packed_product(t, "keys", gather(t, t.input()), {{"k", {2, "keys", true}}}, {4}, false, {});
    expect_fault([&] { product(t, "down", shared, {16}, by_inputs(), false, {}); },
                 "product down needs an input that ranks divide as one, but keys has several pieces");
}

}  // namespace
}  // namespace llmc
