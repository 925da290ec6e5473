// Which blocks of the model lie in which chunk of a pipeline: balanced by what they cost, or as a person gave it. The
// embedding belongs to the first chunk and the head to the last, which gets fewer blocks for it. On which stage a chunk
// runs: pipeline_schedule.h.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "llmc/model/model.h"
#include "llmc/model/recompute.h"

namespace llmc {

// What the parts of a model cost, in floating-point operations a token or any other unit: those before the first layer, the
// layers, and those behind the last.
struct PartCosts {
    double block = 1, embedding = 0, head = 0;
    double again = 0;  // what the last of every `every` layers costs beside that
    std::int64_t every = 1;
    std::vector<double>
        before{};  // where layers differ: of each number of them the cost of all those, from the first on

    double average_block() const {
        return before.empty() ? block + again / static_cast<double>(every)
                              : before.back() / static_cast<double>(before.size() - 1);
    }
    // Of layers [first, end) by their numbers in the model.
    double of_blocks(int first, int end) const {
        if (!before.empty())
            return before[static_cast<std::size_t>(end)] - before[static_cast<std::size_t>(first)];
        const std::int64_t costlier = end / every - first / every;
        return (end - first) * block + static_cast<double>(costlier) * again;
    }
};
// Of a training step: three times what the forward pass takes (model.h), and a layer that is recomputed as a whole once more.
PartCosts part_costs(const Model& model, const Recompute& recompute);

// Blocks [first, end) of a chunk.
struct BlockRange {
    int first = 0, end = 0;
    int count() const { return end - first; }
    bool operator==(const BlockRange&) const = default;
};

// Each chunk's blocks, in the order of the model, at least one each; chunk c lies on stage c % stages. The costliest stage
// costs as little as can be; of several such splits, the second costliest does, and so on; of equal splits the earlier
// stages have more blocks. A stage's chunks share its blocks in the same way. (With several chunks a stage a block counts as
// what blocks cost on the average, where some recompute.) A ProgrammingError if there are fewer layers than chunks
// (check_chunks refuses that).
std::vector<BlockRange> stages_of_layers(int layers, int chunks, int stages, const PartCosts& costs);

// The split that a person gave as numbers of blocks, one a chunk, in the order of the model: "7,6,6,5". A UserError
// that names the option and a split that would do if it is no such list.
std::vector<BlockRange> parse_pipeline_layers(std::string_view text, int layers, int chunks, int stages,
                                              const PartCosts& costs);

}  // namespace llmc
