// Assigns the model's layers to the chunks of a pipeline: balanced by their costs, or as the user asked. The
// embedding belongs to the first chunk and the head to the last, so these chunks get fewer blocks.
// pipeline_schedule.h says on which stage a chunk runs.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "llmc/model/model.h"
#include "llmc/model/part_lists.h"

namespace llmc {

// A search for the best division of more layers x chunks than this would take too long. They are dealt by their
// average cost. If layers differ much, some stages then cost clearly more than others.
inline constexpr std::int64_t most_searched = 1 << 17;

// The costs of the parts of a model: before the first layer, of the layers, and after the last. The unit is
// arbitrary; part_costs() uses floating-point operations per token.
struct PartCosts {
    double block = 1, embedding = 0, head = 0;
    double recompute = 0;  // additional cost of the last layer of each group of `every`
    std::int64_t every = 1;
    // If layers differ: at index n, the cost of the first n layers.
    std::vector<double> before{};

    double average_block() const {
        return before.empty() ? block + recompute / static_cast<double>(every)
                              : before.back() / static_cast<double>(before.size() - 1);
    }
    // The cost of layers [first, end), by their numbers in the model.
    double of_blocks(int first, int end) const {
        if (!before.empty())
            return before[static_cast<std::size_t>(end)] - before[static_cast<std::size_t>(first)];
        const std::int64_t costlier = end / every - first / every;
        return (end - first) * block + static_cast<double>(costlier) * recompute;
    }
};
// The costs in a training step: three times the forward pass (model.h), or four times for a layer that is
// recomputed as a whole.
PartCosts part_costs(const Model& model, const Recompute& recompute);

// Blocks [first, end) of a chunk.
struct BlockRange {
    int first = 0, end = 0;
    int count() const { return end - first; }
    bool operator==(const BlockRange&) const = default;
};

// Each chunk's blocks, in the order of the model, at least one each; chunk c lies on stage c % stages. The
// cost of the costliest stage is as small as possible; then that of the second costliest, and so on. Among
// equal splits, the one with more blocks on earlier stages is chosen. A stage's chunks share its blocks in
// the same way. With several chunks per stage, every block is taken to have the average cost, because it is
// not known which of a stage's blocks recompute. Throws a ProgrammingError if there are fewer layers than
// chunks (check_chunks refuses that).
std::vector<BlockRange> stages_of_layers(int layers, int chunks, int stages, const PartCosts& costs);

// How many chunks a split that the user gave leaves without blocks, which only the first and the last may be.
int chunks_without_layers(std::string_view text);

// Parses a split that the user gave as numbers of blocks, one per chunk, in the order of the model:
// "7,6,6,5". Throws a UserError that names the option and a valid split if the text is no such list.
std::vector<BlockRange> parse_pipeline_layers(std::string_view text, int layers, int chunks, int stages,
                                              const PartCosts& costs);

}  // namespace llmc
