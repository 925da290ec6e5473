// The bytes that each stage of a pipeline sends in a step, from the lists of few layers and micro-batches.
#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "llmc/parallel/mesh.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/plan/micro_batches.h"
#include "llmc/plan/whole_pipeline.h"

namespace llmc {

namespace {

// The run of layers, if there is one and the program divides it among stages.
Model::Run* run_of_layers(RunSpec& spec) {
    std::vector<Model::Run>& runs = spec.model.runs;
    const bool is_one = std::ranges::count(runs, true, &Model::Run::is_layer) == 1;
    return is_one && spec.pipeline_layers.empty() ? &*std::ranges::find(runs, true, &Model::Run::is_layer)
                                                  : nullptr;
}

// The plan of a step whose run of layers repeats `count` times, with `micro_batches` micro-batches, without
// its lists. Its `stages` say what it sends. Stages with the same parts send equally much, so only one of
// them is counted. `most_actions` is reduced by the actions that were counted; nullopt if it falls below 0.
std::optional<RunPlan> plan_of_messages(RunSpec spec, std::int64_t count, std::int64_t micro_batch,
                                        std::int64_t micro_batches, std::int64_t& most_actions) {
    if (Model::Run* run = run_of_layers(spec)) run->count = count;
    spec.global_batch_tokens =
        micro_batches * micro_batch * spec.mesh.data_ranks() * spec.model.sequence_length;
    RunPlan plan = plan_of_whole_pipeline(spec, micro_batch);
    std::vector<UnitLayout> units;
    for (const Outline::OutlinedUnit& unit : plan.outline->units)
        units.emplace_back(unit.spec, spec.mesh.tensor_place());
    std::map<std::vector<int>, BytesSent> counted;
    for (int stage = 0; stage < spec.mesh.pipeline; ++stage) {
        std::vector<int> parts;
        for (const Chunk& chunk : plan.parts[static_cast<std::size_t>(stage)].chunks) {
            for (int part = chunk.first_part; part < chunk.end_part; ++part) {
                const RecomputeKind recompute = recompute_of(*plan.outline, spec.recompute, part);
                parts.insert(parts.end(), {plan.outline->part(part).kind, static_cast<int>(recompute)});
            }
            parts.push_back(-1);
        }
        const auto [sent, is_new] = counted.try_emplace(std::move(parts));
        if (is_new) {
            const Step step = build_training_step(step_spec(plan, stage));
            most_actions -= std::ssize(step.actions);
            if (most_actions < 0) return std::nullopt;
            sent->second = bytes_sent(step, unit_bytes(spec, units), *plan.lists);
        }
        plan.stages.push_back({{}, sent->second});
    }
    return plan;
}

constexpr std::array all_kinds_of_bytes = {&BytesSent::inside, &BytesSent::across, &BytesSent::tied,
                                           &BytesSent::stages, &BytesSent::tensor};

// Whether the steps of three plans grow evenly: the second is longer than the first as the third is longer
// than the second. All chunks get equally many more layers, and each stage sends as much more.
bool grows_evenly(const RunPlan& first, const RunPlan& second, const RunPlan& third) {
    std::set<int> growths;
    for (std::size_t stage = 0; stage < first.parts.size(); ++stage) {
        for (std::size_t i = 0; i < first.parts[stage].chunks.size(); ++i) {
            const auto layers = [&](const RunPlan& plan) { return plan.parts[stage].chunks[i].layers(); };
            growths.insert({layers(second) - layers(first), layers(third) - layers(second)});
        }
        for (const auto kind : all_kinds_of_bytes) {
            const auto sent = [&](const RunPlan& plan) { return plan.stages[stage].sent.*kind; };
            if (sent(third) - sent(second) != sent(second) - sent(first)) return false;
        }
    }
    return growths.size() == 1;
}

}  // namespace

std::vector<UnitBytes> unit_bytes(const RunSpec& spec, std::span<const UnitLayout> units) {
    std::vector<UnitBytes> bytes;
    for (const UnitLayout& unit : units) {
        const auto elements = static_cast<std::uint64_t>(unit.padded_elements(spec.mesh.data_ranks()));
        const auto replicated = static_cast<std::uint64_t>(unit.elements() - unit.replicated_begin());
        bytes.push_back({.parameters = elements * size_of(spec.dtype),
                         .gradients = elements * size_of(spec.gradient_dtype),
                         .replicated_gradients = replicated * size_of(spec.gradient_dtype),
                         .gradient_size = size_of(spec.gradient_dtype)});
    }
    return bytes;
}

// Counts a step if it is short. Otherwise, equal layers send equally much, and groups of micro-batches do too
// once all stages are busy. So short steps are counted, and the whole step is extrapolated from them: from
// few layers and micro-batches, and from more of one and of both. Twice as many more of one must add twice as
// much, or longer steps are counted.
std::optional<RunPlan> plan_of_messages(const RunSpec& spec, std::int64_t counted_whole) {
    check_sizes_of(spec);
    const std::int64_t micro_batch = micro_batch_of(spec), all = spec.rank_sequences() / micro_batch;
    if (spec.mesh.world() == 1) {
        RunPlan alone;
        alone.stages.resize(1);
        return alone;
    }
    const std::int64_t stages = spec.mesh.pipeline, group = spec.virtual_stages > 1 ? stages : 1;
    RunSpec whole = spec;
    const Model::Run* run = run_of_layers(whole);
    const std::int64_t layers = run ? run->count : 1;
    const std::int64_t kinds = run ? std::ssize(run->parts) : spec.model.layers();
    // Shorter steps divide their layers as the whole one does.
    whole.deals_layers = saturated_product(spec.model.layers(), stages * spec.virtual_stages) > most_searched;
    // Plans of more layers or more passes of a stage are not made: each takes some tenths of a second. All
    // actions that are counted take less than one.
    constexpr std::int64_t most_layers = 1 << 14;
    std::int64_t most_actions = 1 << 19;
    const auto plan_of = [&](std::int64_t count, std::int64_t micro_batches,
                             std::int64_t most_passes) -> std::optional<RunPlan> {
        const std::int64_t all_layers = saturated_product(count, kinds);
        if (all_layers > most_layers || all_layers / stages > most_passes / micro_batches)
            return std::nullopt;
        return plan_of_messages(whole, count, micro_batch, micro_batches, most_actions);
    };
    if (std::optional<RunPlan> plan = plan_of(layers, all, counted_whole)) return plan;
    most_actions = 1 << 18;

    // If `turn` is added to the count of layers, every chunk begins with the same kind of layer as before.
    const std::int64_t every = spec.recompute.kind == RecomputeKind::none ? 1 : spec.recompute.every;
    const std::int64_t turn =
        saturated_product(saturated_product(every / std::gcd(kinds, every), stages), spec.virtual_stages);
    for (std::int64_t scale = 1;; scale *= 2) {
        const bool all_layers = !run || layers / turn < 2 * scale + 2,
                   all_groups = all / group < 4 * scale + 2;
        const std::int64_t counted = all_layers ? layers : 2 * scale * turn + layers % turn,
                           few = all_groups ? all : 4 * scale * group + all % group;
        const auto longer_by = [&](int turns, int groups) {
            return plan_of(counted + (all_layers ? 0 : turns * turn), few + (all_groups ? 0 : groups * group),
                           1 << 11);
        };
        std::optional<RunPlan> plan = longer_by(0, 0);
        const std::optional<RunPlan> layers_1 = longer_by(1, 0), layers_2 = longer_by(2, 0),
                                     groups_1 = longer_by(0, 1), groups_2 = longer_by(0, 2),
                                     both = longer_by(1, 1);
        if (!plan || !layers_1 || !layers_2 || !groups_1 || !groups_2 || !both) return std::nullopt;
        if (!grows_evenly(*plan, *layers_1, *layers_2) || !grows_evenly(*plan, *groups_1, *groups_2))
            continue;
        const auto turns = static_cast<long double>(all_layers ? 0 : (layers - counted) / turn);
        const auto groups = static_cast<long double>(all_groups ? 0 : (all - few) / group);
        for (std::size_t stage = 0; stage < plan->stages.size(); ++stage) {
            for (const auto kind : all_kinds_of_bytes) {
                const auto sent = [&](const RunPlan& of) {
                    return static_cast<long double>(of.stages[stage].sent.*kind);
                };
                const long double base = sent(*plan), per_turn = sent(*layers_1) - base,
                                  per_group = sent(*groups_1) - base,
                                  per_turn_and_group = sent(*both) - sent(*layers_1) - per_group;
                // Sizes may be absurd. The limit leaves room for the sum of these numbers, which is shown
                // too.
                plan->stages[stage].sent.*kind = static_cast<std::uint64_t>(std::min(
                    0x1p60L,
                    base + turns * per_turn + groups * per_group + turns * groups * per_turn_and_group));
            }
        }
        return plan;
    }
}

}  // namespace llmc
