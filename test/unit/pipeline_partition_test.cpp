// Distribution of blocks over the chunks of a pipeline: as even as possible, or as a given list says.
#include "llmc/parallel/pipeline/pipeline_partition.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "test/gpt2_units.h"

namespace llmc {
namespace {

std::vector<int> counts_of(const std::vector<BlockRange>& ranges) {
    std::vector<int> counts;
    for (const BlockRange& range : ranges) counts.push_back(range.count());
    return counts;
}

struct Costs {
    std::vector<double> stages, chunks;  // the largest first
    std::vector<int> blocks;             // the blocks of each stage
};
Costs sorted_costs(const std::vector<int>& counts, int stages, const PartCosts& costs) {
    const auto number = static_cast<std::size_t>(stages);
    std::vector<double> all, of_stages(number);
    std::vector<int> blocks(number);
    int block = 0;
    for (const int count : counts) {
        double& cost = all.emplace_back(0);
        for (const int end = block + count; block < end; ++block)
            cost += costs.block + (block % costs.every == costs.every - 1 ? costs.recompute : 0);
    }
    all.front() += costs.embedding;
    all.back() += costs.head;
    for (std::size_t chunk = 0; chunk < all.size(); ++chunk) of_stages[chunk % number] += all[chunk];
    for (std::size_t chunk = 0; chunk < all.size(); ++chunk) blocks[chunk % number] += counts[chunk];
    std::ranges::sort(all, std::greater<>());
    std::ranges::sort(of_stages, std::greater<>());
    return {of_stages, all, blocks};
}

void for_all_splits(int layers, int chunks, std::vector<int>& counts,
                    const std::function<void(const std::vector<int>&)>& f) {
    if (chunks == 0) {
        if (layers == 0) f(counts);
        return;
    }
    for (int count = 1; count <= layers; ++count) {
        counts.push_back(count);
        for_all_splits(layers - count, chunks - 1, counts, f);
        counts.pop_back();
    }
}

void expect_no_better_split(int layers, int chunks, int stages, const PartCosts& costs) {
    SCOPED_TRACE(
        fmt::format("{} layers, {} chunks, {} stages, embedding {}, head {}, recompute {} of every block {}",
                    layers, chunks, stages, costs.embedding, costs.head, costs.recompute, costs.every));
    const std::vector<BlockRange> found = stages_of_layers(layers, chunks, stages, costs);
    ASSERT_EQ(found.size(), static_cast<std::size_t>(chunks));
    int end = 0;
    for (const BlockRange& range : found) {
        EXPECT_EQ(range.first, end);
        EXPECT_GE(range.count(), 1);
        end = range.end;
    }
    EXPECT_EQ(end, layers);
    const std::vector<int> ours = counts_of(found);
    const Costs cost = sorted_costs(ours, stages, costs);
    std::vector<int> counts;
    for_all_splits(layers, chunks, counts, [&](const std::vector<int>& other) {
        const Costs others = sorted_costs(other, stages, costs);
        const bool no_better_chunks =
            cost.chunks < others.chunks || (cost.chunks == others.chunks && ours >= other);
        EXPECT_TRUE(cost.stages < others.stages ||
                    (cost.stages == others.stages && (no_better_chunks || cost.blocks != others.blocks)))
            << fmt::format("{} against {}", fmt::join(ours, ","), fmt::join(other, ","));
    });
}

TEST(PipelinePartition, NoSplitIsMoreEven) {
    for (int layers = 1; layers <= 12; ++layers)
        for (int chunks = 1; chunks <= std::min(layers, 6); ++chunks)
            for (const double embedding : {0.0, 0.5, 3.0})
                for (const double head : {0.0, 0.25, 1.0, 1.5, 2.0, 7.0})
                    expect_no_better_split(layers, chunks, chunks,
                                           {.block = 1, .embedding = embedding, .head = head});
}

// The work of whole stages counts, not that of single chunks.
TEST(PipelinePartition, NoSplitIsMoreEvenOfSeveralChunksAStage) {
    for (int layers = 4; layers <= 13; ++layers)
        for (const auto& [stages, chunks] : {std::pair{2, 4}, {2, 6}, {3, 6}})
            for (const double embedding : {0.0, 0.5})
                for (const double head : {0.0, 0.25, 1.0, 1.5, 4.75, 7.0})
                    if (layers >= chunks)
                        expect_no_better_split(layers, chunks, stages,
                                               {.block = 1, .embedding = embedding, .head = head});
}

// Blocks that recompute cost a third more.
TEST(PipelinePartition, NoSplitIsMoreEvenWhereSomeRecompute) {
    for (int layers = 1; layers <= 11; ++layers)
        for (int chunks = 1; chunks <= std::min(layers, 5); ++chunks)
            for (int every = 1; every <= layers; ++every)
                for (const double head : {0.0, 1.0, 4.5, 15.0})
                    expect_no_better_split(
                        layers, chunks, chunks,
                        {.block = 3, .embedding = 0.25, .head = head, .recompute = 1, .every = every});
}

// Dividing a deep model into many chunks takes negligible time.
TEST(PipelinePartition, DividesDeepModels) {
    const std::vector<BlockRange> chunks =
        stages_of_layers(400, 120, 120, {.block = 3, .head = 4, .recompute = 1, .every = 7});
    EXPECT_EQ(chunks.back().end, 400);
}

TEST(PipelinePartition, TheHeadTakesTheRoomOfBlocks) {
    const PartCosts alike{};
    EXPECT_EQ(counts_of(stages_of_layers(10, 4, 4, alike)), (std::vector{3, 3, 2, 2}));
    EXPECT_EQ(counts_of(stages_of_layers(24, 4, 4, {.head = 1.5})), (std::vector{7, 6, 6, 5}));
    EXPECT_EQ(counts_of(stages_of_layers(6, 2, 2, {.head = 100})), (std::vector{5, 1}));
}

TEST(PipelinePartition, CostsAreThoseOfTheModel) {
    const GPTConfig gpt2_124m{
        .layers = 12, .heads = 12, .channels = 768, .sequence_length = 1024, .vocabulary = 50257};
    EXPECT_EQ(block_cost(gpt2_124m), 24.0 * 768 * 768 + 2.0 * 1024 * 768);
    EXPECT_EQ(embedding_cost(gpt2_124m), 768);
    EXPECT_EQ(3 * (12 * block_cost(gpt2_124m) + head_cost(gpt2_124m)),
              training_flops_per_token(gpt2(gpt2_124m)));
    // The head costs as much as five blocks, the embedding almost nothing.
    EXPECT_EQ(counts_of(stages_of_layers(12, 4, 4, part_costs(gpt2(gpt2_124m), {}))),
              (std::vector{3, 4, 4, 1}));
    // With two stages, the second has the head and four blocks.
    EXPECT_EQ(counts_of(stages_of_layers(12, 4, 2, part_costs(gpt2(gpt2_124m), {}))),
              (std::vector{4, 3, 4, 1}));
    const PartCosts costs = part_costs(gpt2(gpt2_124m), {});
    EXPECT_EQ(12 * costs.block + costs.head, training_flops_per_token(gpt2(gpt2_124m)));
}

// A recomputed block runs forward twice, the head does not. So the head replaces fewer blocks.
TEST(PipelinePartition, RecomputeCostsAForward) {
    const GPTConfig config{
        .layers = 12, .heads = 12, .channels = 768, .sequence_length = 256, .vocabulary = 50304};
    const auto counts = [&](const Recompute& recompute) {
        return counts_of(stages_of_layers(12, 2, 2, part_costs(gpt2(config), recompute)));
    };
    EXPECT_EQ(counts({}), (std::vector{9, 3}));
    EXPECT_EQ(counts({.kind = RecomputeKind::block}), (std::vector{8, 4}));
    // Selective recompute costs almost nothing.
    EXPECT_EQ(counts({.kind = RecomputeKind::selective}), (std::vector{9, 3}));
    const double block = block_cost(config);
    const PartCosts third = part_costs(gpt2(config), {.kind = RecomputeKind::block, .every = 3});
    EXPECT_EQ(third.of_blocks(0, 2), 6 * block);
    EXPECT_EQ(third.of_blocks(2, 3), 4 * block);
    EXPECT_EQ(third.of_blocks(1, 9), 27 * block);
    EXPECT_EQ(part_costs(gpt2(config), {.kind = RecomputeKind::selective, .every = 3}).of_blocks(0, 12),
              36 * block);
}

TEST(PipelinePartition, AListGivenByHand) {
    EXPECT_EQ(counts_of(parse_pipeline_layers("7,6,6,5", 24, 4, 4, {})), (std::vector{7, 6, 6, 5}));
    EXPECT_EQ(parse_pipeline_layers("1,2", 3, 2, 2, {})[1], (BlockRange{1, 3}));
    EXPECT_EQ(counts_of(parse_pipeline_layers("3", 3, 1, 1, {})), std::vector{3});
    const auto refused = [](const std::string& text) -> std::string {
        try {
            parse_pipeline_layers(text, 24, 4, 4, {.head = 1.5});
            return "not refused";
        } catch (const UserError& fault) {
            return fault.what();
        }
    };
    EXPECT_EQ(
        refused("6,6,6,7"),
        "--pipeline-layers 6,6,6,7 adds up to 25 layers, but --layers is 24; try --pipeline-layers 7,6,6,5");
    EXPECT_EQ(refused("12,12"),
              "--pipeline-layers 12,12 has 2 numbers, but the pipeline has 4 chunks; try "
              "--pipeline-layers 7,6,6,5");
    for (const char* text :
         {"", ",", "6,6,6,", "6,6,,12", "6, 6,6,6", "6;6;6;6", "8,8,9,-1", "6.0,6,6,6", "99999999999,6,6,6"})
        EXPECT_NE(refused(text).find("instead of a number of layers"), std::string::npos) << text;
    EXPECT_NE(refused("2147483647,2147483647,2147483647,27").find("adds up to"), std::string::npos);
    EXPECT_EQ(counts_of(parse_pipeline_layers("0,12,12,0", 24, 4, 4, {})), (std::vector{0, 12, 12, 0}));
    EXPECT_EQ(counts_of(parse_pipeline_layers("0,1,1,0", 2, 4, 4, {})), (std::vector{0, 1, 1, 0}));
    EXPECT_THROW(parse_pipeline_layers("0,1,2,0", 2, 4, 4, {}), UserError);
    for (const auto& [text, without] :
         {std::pair("0,3", 1), {"3,0", 1}, {"0,3,0", 2}, {"10,1,20", 0}, {"", 0}, {"0", 0}})
        EXPECT_EQ(chunks_without_layers(text), without) << text;
    EXPECT_EQ(
        refused("24,0,0,0"),
        "--pipeline-layers 24,0,0,0 gives chunk 2 no layer, which only the first and the last may lack; try "
        "--pipeline-layers 22,1,1,0");
}

}  // namespace
}  // namespace llmc
