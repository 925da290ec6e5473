// The table of operations (llmc/model/operation.h) gives the same floating-point operations as the operations of its
// calls (llmc/device/ops.h).
#include <gtest/gtest.h>

#include <string_view>
#include <utility>
#include <vector>

#include "llmc/device/counting_ops.h"
#include "llmc/model/part_lists.h"
#include "test/gpt2_config.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

// Padded columns of the logits are computed too. This configuration has none.
constexpr GPTConfig config{.layers = 2, .heads = 2, .channels = 12, .sequence_length = 7, .vocabulary = 128};

double of_tokens(const Part& part, const Node& node, bool forward, bool backward) {
    const Work work = node.operation->work(part, node);
    const double keys = static_cast<double>(part.tokens + 1) / 2, times = forward ? 1 : 0;
    double sum = times * (work.products + keys * work.pairs + work.other);
    if (backward) sum += 2 * work.products + 2.5 * keys * work.pairs + work.other_backward;
    return sum * static_cast<double>(part.tokens);
}

// The operations of a list's calls for a node, without the sums of several gradients of one value.
double flops(const PartLists& lists, const List& list, const Node& node) {
    CountingOps ops;
    PartMemory memory;
    memory.one.fill(marked_address(1));
    for (const ListCall& call : list) {
        const bool is_sum = call.name == "add" && (&list != &lists.forward || node.operation->name != "add");
        if (call.node == &node && !is_sum)
            run_call(call, memory, 1,
                     {.ops = ops, .ranks = {}, .node = nullptr, .loss_scale = 1, .rows = {}});
    }
    double sum = 0;
    for (const auto& [_, cost] : ops.counted) sum += cost.flops;
    return sum;
}

std::vector<Part> parts_of(const Model& model) {
    std::vector<Part> parts;
    for (const Model::Run& run : model.runs) parts.insert(parts.end(), run.parts.begin(), run.parts.end());
    return parts;
}

Model small(std::string_view name, std::vector<std::pair<std::string, ModelValue>> changes) {
    for (const auto& [option, size] : {std::pair{"layers", 1},
                                       {"seq-len", 7},
                                       {"vocab-size", 128},
                                       {"heads", 4},
                                       {"kv-heads", 2},
                                       {"channels", 12},
                                       {"mlp-size", 10}})
        changes.insert(changes.begin(), {option, std::int64_t{size}});
    return model_with(name, changes);
}

TEST(OperationFlops, AreThoseOfTheDevicesOperations) {
    const ModelValue size = std::int64_t{4}, all = std::string("all"), behind = std::string("behind");
    for (const Model& model :
         {gpt2(config), strange::model(), small("llama-tiny", {{"head-size", size}, {"window", size}}),
          small("llama-tiny", {{"head-size", size}, {"qk-norm", all}, {"norms", behind}}),
          small("nanochat-tiny", {{"channels", std::int64_t{16}}})}) {
        for (const Part& part : parts_of(model)) {
            Scratch scratch;
            const PartLists lists = derive_lists(part, {.logits_rows = part.tokens}, scratch);
            for (const Node& node : part.nodes) {
                SCOPED_TRACE(part.name + ": " + node.name);
                if (node.operation->is_forward_in_backward && model.vocabulary % vocabulary_multiple != 0)
                    continue;
                EXPECT_EQ(flops(lists, lists.forward, node), of_tokens(part, node, true, false));
                EXPECT_EQ(flops(lists, lists.backward, node),
                          of_tokens(part, node, part.makes_losses(), true));
            }
        }
    }
}

// With a window W, row t sees min(t + 1, W) of its keys: with W = 3, 7 rows see 1 + 2 + 5 * 3,
// without it 28.
TEST(OperationFlops, OfAttentionAreFewerWithAWindow) {
    const auto pairs = [](std::int64_t window) {
        const Part part =
            small("llama-tiny", {{"window", window}, {"head-size", std::int64_t{4}}}).runs[1].parts[0];
        const auto node = std::ranges::find_if(
            part.nodes, [](const Node& one) { return one.operation->name == "attention"; });
        return node->operation->work(part, *node).pairs;
    };
    const double all = pairs(0);
    EXPECT_EQ(all, 4.0 * 4 * 4);  // 4 heads of 4 elements
    EXPECT_DOUBLE_EQ(pairs(3), all * (1 + 2 + 5 * 3) / 28);
    EXPECT_DOUBLE_EQ(pairs(1), all * 7 / 28);
    EXPECT_EQ(pairs(7), all);
    EXPECT_EQ(pairs(9), all);
    const auto of_training = [](std::int64_t window) {
        return training_flops_per_token(
            small("llama-tiny", {{"window", window}, {"head-size", std::int64_t{4}}}));
    };
    EXPECT_EQ(of_training(0), of_training(7));
    EXPECT_LT(of_training(3), of_training(4));
}

}  // namespace
}  // namespace llmc
