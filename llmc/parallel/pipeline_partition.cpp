#include "llmc/parallel/pipeline_partition.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <string>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

double block_cost(const GPTConfig& config) {
    const auto C = static_cast<double>(config.channels), T = static_cast<double>(config.sequence_length);
    return 24 * C * C + 2 * T * C;
}

double head_cost(const GPTConfig& config) {
    return 2 * static_cast<double>(config.vocabulary) * static_cast<double>(config.channels);
}

double embedding_cost(const GPTConfig& config) { return static_cast<double>(config.channels); }

PartCosts part_costs(const GPTConfig& config, const Recompute& recompute) {
    const double again =
        recompute.kind == RecomputeKind::block ? 1 / static_cast<double>(recompute.every) : 0;
    return {.block = (3 + again) * block_cost(config),
            .embedding = 3 * embedding_cost(config),
            .head = 3 * head_cost(config)};
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

// Blocks are alike, so that any numbers of them can be had side by side, and each next one best goes where it makes the
// least sum: a split that had it elsewhere would only lose by the exchange.
std::vector<int> balanced_counts(int layers, int chunks, const PartCosts& costs) {
    std::vector<int> counts(static_cast<std::size_t>(chunks), 1);
    const auto cost = [&](int chunk) {
        const double ends = (chunk == 0 ? costs.embedding : 0) + (chunk == chunks - 1 ? costs.head : 0);
        return ends + counts[static_cast<std::size_t>(chunk)] * costs.block;
    };
    for (int block = chunks; block < layers; ++block) {
        int cheapest = 0;
        for (int chunk = 1; chunk < chunks; ++chunk) {
            if (cost(chunk) < cost(cheapest)) cheapest = chunk;
        }
        ++counts[static_cast<std::size_t>(cheapest)];
    }
    return counts;
}

}  // namespace

std::vector<BlockRange> stages_of_layers(int layers, int chunks, const PartCosts& costs) {
    check(chunks >= 1 && layers >= chunks, "pipeline: fewer layers than chunks");
    return ranges_of(balanced_counts(layers, chunks, costs));
}

std::vector<BlockRange> parse_pipeline_layers(std::string_view text, int layers, int chunks,
                                              const PartCosts& costs) {
    check(chunks >= 1 && layers >= chunks, "pipeline: fewer layers than chunks");
    const auto refuse = [&](std::string_view why) {
        user_error("--pipeline-layers {} {}; try --pipeline-layers {}", one_line(text), why,
                   fmt::join(balanced_counts(layers, chunks, costs), ","));
    };
    std::vector<int> counts;
    std::int64_t sum = 0;
    for (std::string_view rest = text;;) {
        const std::string_view word = rest.substr(0, rest.find(','));
        int count = 0;
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), count);
        if (error != std::errc() || end != word.data() + word.size() || count < 1)
            refuse(fmt::format("has '{}' where a number of layers belongs, 1 or more", one_line(word)));
        counts.push_back(count);
        sum += count;
        if (word.size() == rest.size()) break;
        rest.remove_prefix(word.size() + 1);
    }
    if (counts.size() != static_cast<std::size_t>(chunks)) {
        refuse(fmt::format("has {}, and the pipeline has {} to put layers in",
                           plural(static_cast<std::int64_t>(counts.size()), "number"),
                           plural(chunks, "chunk")));
    }
    if (sum != layers) refuse(fmt::format("adds up to {}, and --layers is {}", plural(sum, "layer"), layers));
    return ranges_of(counts);
}

}  // namespace llmc
