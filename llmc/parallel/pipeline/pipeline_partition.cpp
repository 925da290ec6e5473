// Computes the costs of a model's parts, and splits its blocks into balanced chunks.
#include "llmc/parallel/pipeline/pipeline_partition.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

PartCosts part_costs(const Model& model, const Recompute& recompute) {
    const bool is_costly = recompute.kind == RecomputeKind::block;
    PartCosts costs{.block = 0, .every = is_costly ? recompute.every : 1};
    std::int64_t layers = 0;
    bool differ = false;
    double behind = 0;  // the cost of non-layer parts since the last layer
    for (const Model::Run& run : model.runs) {
        for (const Part& part : run.parts) {
            const double forward = forward_cost(part), both = forward + backward_cost(part);
            if (!run.is_layer) {
                (layers == 0 ? costs.embedding : behind) += both * static_cast<double>(run.count);
                continue;
            }
            differ = differ || (layers > 0 && costs.block != both) || behind > 0;
            costs.block = both;
            costs.recompute = is_costly ? forward : 0;
            layers += run.count;
        }
    }
    if (!differ) {
        costs.head = behind;
        return costs;
    }
    costs.before = {0};
    behind = 0;
    for (const Model::Run& run : model.runs) {
        for (std::int64_t i = 0; i < run.count; ++i) {
            for (const Part& part : run.parts) {
                const double forward = forward_cost(part), both = forward + backward_cost(part);
                const bool is_between = std::ssize(costs.before) > 1;
                if (!run.is_layer) {
                    behind += is_between ? both : 0;
                    continue;
                }
                // A part that is no layer counts with the layer before it.
                costs.before.back() += std::exchange(behind, 0);
                const bool recomputes = recompute.of(std::ssize(costs.before) - 1) == RecomputeKind::block;
                costs.before.push_back(costs.before.back() + both + (recomputes ? forward : 0));
            }
        }
    }
    costs.head = behind;
    return costs;
}

namespace {

std::vector<BlockRange> ranges_of(const std::vector<int>& counts) {
    std::vector<BlockRange> ranges;
    int first = 0;
    for (const int count : counts) {
        ranges.push_back({first, first + count});
        first += count;
    }
    return ranges;
}

double cost_of(int chunk, int chunks, int first, int end, const PartCosts& costs) {
    return (chunk == 0 ? costs.embedding : 0) + (chunk == chunks - 1 ? costs.head : 0) +
           costs.of_blocks(first, end);
}

// The cost of the costliest chunk if all chunks have equally many blocks. No chunk of the best split costs
// more.
double most_when_even(int layers, int chunks, const PartCosts& costs) {
    double most = 0;
    for (int chunk = 0, first = 0; chunk < chunks; ++chunk) {
        const int end = first + layers / chunks + (chunk < layers % chunks ? 1 : 0);
        most = std::max(most, cost_of(chunk, chunks, first, end, costs));
        first = end;
    }
    return most;
}

// The best split of the blocks from some block on, over the chunks from some chunk on.
struct Split {
    int first_end = 0;               // the end of the first of these chunks
    std::vector<double> costs = {};  // costs of all these chunks, the largest first; empty: no such split
};

// Splits unequal blocks over stages with one chunk each, by dynamic programming from the last chunk to the
// first.
// Lists of costs are sorted and compared entry by entry. Adding the same cost to two lists does not change
// which is less. So the best split contains the best split of the later chunks. Longer chunks win among equal
// splits.
std::vector<int> counts_of_stages(int layers, int chunks, const PartCosts& costs) {
    const auto number = [](int n) { return static_cast<std::size_t>(n); };
    const double most = most_when_even(layers, chunks, costs);
    const auto is_cheap = [&](int chunk, int first, int end) {
        return cost_of(chunk, chunks, first, end, costs) <= most;
    };
    // The last block at which each chunk can begin: all earlier chunks are as long as `most` allows.
    std::vector<int> last_first(number(chunks), 0);
    for (int chunk = 1; chunk < chunks; ++chunk) {
        int& first = last_first[number(chunk)] = last_first[number(chunk - 1)];
        for (const int begin = first;
             first < layers - (chunks - chunk) && is_cheap(chunk - 1, begin, first + 1);)
            ++first;
    }
    std::vector<std::vector<Split>> best(number(chunks), std::vector<Split>(number(layers)));
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        const bool is_last = chunk == chunks - 1;
        for (int first = last_first[number(chunk)]; first >= chunk; --first) {
            Split& split = best[number(chunk)][number(first)];
            const int longest = layers - (chunks - 1 - chunk), shortest = is_last ? layers : first + 1;
            for (int end = shortest; end <= longest && is_cheap(chunk, first, end); ++end) {
                std::vector<double> all;
                if (!is_last) {
                    all = best[number(chunk) + 1][number(end)].costs;
                    if (all.empty()) continue;
                }
                const double cost = cost_of(chunk, chunks, first, end, costs);
                all.insert(std::ranges::upper_bound(all, cost, std::greater<>()), cost);
                if (split.costs.empty() || all <= split.costs) split = {end, std::move(all)};
            }
            // With an earlier first block, the chunks from here on would cost more still.
            if (split.costs.empty()) break;
        }
    }
    std::vector<int> counts;
    for (int chunk = 0, first = 0; chunk < chunks; ++chunk) {
        const int end = best[number(chunk)][number(first)].first_end;
        counts.push_back(end - first);
        first = end;
    }
    return counts;
}

// Gives blocks one by one to the entry with the lowest cost, the first if several are equal. If all blocks
// cost the same, this gives the smallest list of costs (sorted from the largest).
void deal(int blocks, double block_cost, std::span<int> counts, std::span<const double> costs) {
    using Entry = std::pair<double, std::size_t>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> cheapest;
    for (std::size_t i = 0; i < costs.size(); ++i) cheapest.emplace(costs[i], i);
    for (; blocks > 0; --blocks) {
        const auto [cost, i] = cheapest.top();
        cheapest.pop();
        ++counts[i];
        cheapest.emplace(cost + block_cost, i);
    }
}

// Splits blocks over stages, and then each stage's blocks over its chunks. This gives the best split of equal
// blocks if each stage has one chunk. Which of a stage's blocks recompute is known only after the split. So
// every block is taken to have the average cost.
std::vector<int> counts_of_chunks(int layers, int chunks, int stages, const PartCosts& costs) {
    const double block = costs.average_block();
    const int chunks_per_stage = chunks / stages;
    const auto cost_without_blocks = [&](int chunk) { return cost_of(chunk, chunks, 0, 0, costs); };
    std::vector<int> stage_counts(static_cast<std::size_t>(stages), chunks_per_stage);
    std::vector<double> stage_costs(stage_counts.size(), chunks_per_stage * block);
    stage_costs.front() += cost_without_blocks(0);
    stage_costs.back() += cost_without_blocks(chunks - 1);
    deal(layers - chunks, block, stage_counts, stage_costs);

    std::vector<int> counts(static_cast<std::size_t>(chunks));
    for (int stage = 0; stage < stages; ++stage) {
        std::vector<int> own(static_cast<std::size_t>(chunks_per_stage), 1);
        std::vector<double> own_costs;
        for (int chunk = stage; chunk < chunks; chunk += stages)
            own_costs.push_back(block + cost_without_blocks(chunk));
        deal(stage_counts[static_cast<std::size_t>(stage)] - chunks_per_stage, block, own, own_costs);
        for (int i = 0; i < chunks_per_stage; ++i)
            counts[static_cast<std::size_t>(stage + i * stages)] = own[static_cast<std::size_t>(i)];
    }
    return counts;
}

std::vector<int> balanced_counts(int layers, int chunks, int stages, const PartCosts& costs) {
    check(stages >= 1 && chunks % stages == 0, "pipeline: all stages have the same number of chunks");
    check(layers >= chunks, "pipeline: fewer layers than chunks");
    const bool are_equal = costs.before.empty() && (costs.recompute == 0 || costs.every == 1);
    const bool searches = chunks == stages && !are_equal && std::int64_t{layers} * chunks <= most_searched;
    return searches ? counts_of_stages(layers, chunks, costs)
                    : counts_of_chunks(layers, chunks, stages, costs);
}

}  // namespace

std::vector<BlockRange> stages_of_layers(int layers, int chunks, int stages, const PartCosts& costs) {
    return ranges_of(balanced_counts(layers, chunks, stages, costs));
}

namespace {

// The first chunk may have the table alone, and the last one the head.
bool needs_layer(std::size_t chunk, std::size_t chunks) { return chunk > 0 && chunk + 1 < chunks; }

// The split nearest to `counts` that gives a layer to every chunk that needs one: it takes a layer of the nearest chunk
// that has several. Nothing if the counts do not add up to the layers.
std::optional<std::vector<int>> without_empty_chunks(std::vector<int> counts, int layers) {
    if (std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) != layers) return std::nullopt;
    for (std::size_t empty = 0; empty < counts.size(); ++empty) {
        if (counts[empty] > 0 || !needs_layer(empty, counts.size())) continue;
        const auto distance = [&](std::size_t chunk) {
            return chunk < empty ? empty - chunk : chunk - empty;
        };
        std::optional<std::size_t> giver;
        for (std::size_t chunk = 0; chunk < counts.size(); ++chunk) {
            if (counts[chunk] > 1 && (!giver || distance(chunk) < distance(*giver))) giver = chunk;
        }
        if (!giver) return std::nullopt;
        --counts[*giver];
        ++counts[empty];
    }
    return counts;
}

// A split of which a message gives an example. With fewer layers than chunks, the last chunk has none, then the first.
std::vector<int> example_counts(int layers, int chunks, int stages, const PartCosts& costs) {
    if (layers >= chunks) return balanced_counts(layers, chunks, stages, costs);
    std::vector<int> counts(static_cast<std::size_t>(chunks), 1);
    counts.back() = 0;
    if (layers + 1 < chunks) counts.front() = 0;
    return counts;
}

}  // namespace

int chunks_without_layers(std::string_view text) {
    return (text.starts_with("0,") ? 1 : 0) + (text.ends_with(",0") ? 1 : 0);
}

std::vector<BlockRange> parse_pipeline_layers(std::string_view text, int layers, int chunks, int stages,
                                              const PartCosts& costs) {
    std::vector<int> counts;
    std::int64_t sum = 0;
    const auto refuse_split = [&](const Rule& rule, std::string_view why) {
        std::optional<std::vector<int>> nearest;
        if (counts.size() == static_cast<std::size_t>(chunks)) nearest = without_empty_chunks(counts, layers);
        const std::string change =
            fmt::format("--pipeline-layers {}",
                        fmt::join(nearest ? *nearest : example_counts(layers, chunks, stages, costs), ","));
        refuse({rule.rule, rule.value, rule.limit, change}, "--pipeline-layers {} {}; try {}", one_line(text),
               why, change);
    };
    for (std::string_view rest = text;;) {
        const std::string_view word = rest.substr(0, rest.find(','));
        const auto count = whole_number<int>(word);
        if (!count || *count < 0)
            user_error(
                "--pipeline-layers {} has '{}' instead of a number of layers; try --pipeline-layers {}",
                one_line(text), one_line(word),
                fmt::join(example_counts(layers, chunks, stages, costs), ","));
        counts.push_back(*count);
        sum += *count;
        if (word.size() == rest.size()) break;
        rest.remove_prefix(word.size() + 1);
    }
    const auto given = static_cast<std::int64_t>(counts.size());
    if (given != chunks)
        refuse_split(
            {"a number of layers for each chunk", given, chunks},
            fmt::format("has {}, but the pipeline has {}", plural(given, "number"), plural(chunks, "chunk")));
    for (std::size_t chunk = 0; chunk < counts.size(); ++chunk)
        if (counts[chunk] == 0 && needs_layer(chunk, counts.size()))
            refuse_split({"a layer for each chunk but the first and the last", 0, 1},
                         fmt::format("gives chunk {} no layer, which only the first and the last may lack",
                                     chunk + 1));
    if (sum != layers)
        refuse_split({"the chunks have all layers", sum, layers},
                     fmt::format("adds up to {}, but --layers is {}", plural(sum, "layer"), layers));
    return ranges_of(counts);
}

}  // namespace llmc
