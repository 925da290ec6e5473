#include "llmc/plan/run_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/plan/micro_batches.h"

namespace llmc {

namespace {

// Tokens and targets are int32, and the vocabulary is rounded up.
void check_vocabulary(std::int64_t vocabulary) {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / 128 * 128;
    if (vocabulary > most) user_error("--vocab-size {} is out of range; give 1 to {}", vocabulary, most);
}

PartSizes part_sizes(const RunPlan& plan) {
    const RunSpec& spec = plan.spec;
    PartSizes sizes{.split = spec.mesh.split(), .batch = plan.micro_batch, .dtype = spec.dtype};
    // The rows of logits computed at a time: as many as fit in logits_bytes, a multiple of the products' tile
    // if more than a tile fits.
    constexpr std::int64_t tile = 128;
    const std::int64_t row =
        workspace_request(spec.model, sizes).vocabulary * static_cast<std::int64_t>(size_of(spec.dtype));
    const std::int64_t fit = spec.logits_bytes / row;
    sizes.logits_rows = std::clamp<std::int64_t>(fit > tile ? fit / tile * tile : fit, 1,
                                                 plan.micro_batch * spec.model.sequence_length);
    return sizes;
}

// Memory without a dtype, in fp32 words.
BufferId add_bytes(MemoryLayout& memory, ArenaKind arena, std::size_t bytes) {
    return memory.add(arena, std::string(name_of(arena)), DType::fp32,
                      {static_cast<std::int64_t>((bytes + 3) / 4)});
}

std::size_t bytes_of_whole_gradients(const RunPlan& plan) {
    Sharding sharding = plan.spec.mesh.sharding;
    if (!sharding.holds_back_gradients() || !plan.spec.trains) return 0;
    sharding.reduces_each_micro_batch = true;
    MemoryLayout otherwise;
    lay_out_store(otherwise, {plan.spec.dtype, plan.spec.gradient_dtype}, plan.part(), sharding,
                  static_cast<int>(plan.micro_batches), plan.spec.mesh.tensor_place());
    const std::size_t whole = plan.memory.bytes(ArenaKind::gradients);
    return whole - std::min(whole, otherwise.bytes(ArenaKind::gradients));
}

// ---- the pipeline

std::vector<StagePart> parts_of_stages(const RunSpec& spec, const std::shared_ptr<const Outline>& outline) {
    if (spec.mesh.pipeline == 1) return {whole_model(outline)};
    PartCosts costs = part_costs(spec.model, spec.recompute);
    costs.are_dealt = spec.deals_layers;
    const auto layers = static_cast<int>(outline->layers.size());
    const int stages = spec.mesh.pipeline, chunks = stages * spec.virtual_stages;
    const std::vector<BlockRange> blocks =
        spec.pipeline_layers.empty()
            ? stages_of_layers(layers, chunks, stages, costs)
            : parse_pipeline_layers(spec.pipeline_layers, layers, chunks, stages, costs);
    const PipelineSpec pipeline{.schedule = spec.pipeline_schedule};
    return parts_of_stages(outline, blocks, stages, pipeline.splits_backward(), spec.recompute);
}

// The step of one pipeline stage.
StepSpec step_spec(const RunPlan& plan, int stage) {
    return {.part = plan.parts[static_cast<std::size_t>(stage)],
            .stage = stage,
            .pipeline = plan.pipeline,
            .sharding = plan.spec.mesh.sharding,
            .tensor = plan.spec.mesh.split(),
            .rounds_gradients = plan.spec.gradient_dtype != DType::fp32,
            .recompute = plan.spec.recompute};
}

// Evaluates one micro-batch per stage at a time, so that all stages are busy.
StepSpec evaluation_spec(const RunPlan& plan, int stage) {
    StepSpec spec = step_spec(plan, stage);
    spec.pipeline.micro_batches = spec.pipeline.stages;
    spec.slots = buffers_in_flight(plan.training).first_parts;
    return spec;
}

StepSpec single_micro_batch_spec(const RunPlan& plan, int stage) {
    StepSpec spec = evaluation_spec(plan, stage);
    spec.pipeline.micro_batches = 1;
    return spec;
}

void build_lists(RunPlan& plan) {
    const int stage = plan.spec.mesh.stage();
    plan.training = build_training_step(step_spec(plan, stage));
    plan.evaluation = build_evaluation_step(evaluation_spec(plan, stage));
    plan.generation = build_generation_step(single_micro_batch_spec(plan, stage));
    plan.diagnosis = build_evaluation_step(single_micro_batch_spec(plan, stage));
    plan.parameter_gathers = build_parameter_gathers(step_spec(plan, stage));
}

// The lists of all stages, which must agree.
class ListsOfStages {
  public:
    void add(const RunPlan& plan) {
        for (std::size_t i = 0; i < lists_.size(); ++i) {
            const Step& list = plan.*kinds[i];
            check_step(list);
            lists_[i].push_back(list);
        }
    }
    void check() const {
        for (const std::vector<Step>& stages : lists_) check_stages(stages);
    }

  private:
    static constexpr std::array kinds = {&RunPlan::training, &RunPlan::evaluation, &RunPlan::generation,
                                         &RunPlan::diagnosis, &RunPlan::parameter_gathers};
    std::array<std::vector<Step>, kinds.size()> lists_;
};

// ---- the plan

// The largest numbers of buffers that any of the stage's lists uses at once.
BuffersInFlight in_flight(const RunPlan& plan) {
    BuffersInFlight most;
    for (const Step* list : {&plan.training, &plan.evaluation, &plan.generation, &plan.diagnosis}) {
        const BuffersInFlight of = buffers_in_flight(*list);
        most.slots = std::max(most.slots, of.slots);
        most.chunk_inputs = std::max(most.chunk_inputs, of.chunk_inputs);
        most.residual_gradients = std::max(most.residual_gradients, of.residual_gradients);
        most.output_gradients = std::max(most.output_gradients, of.output_gradients);
        most.tokens = std::max(most.tokens, of.tokens);
        if (list == &plan.training) most.first_parts = of.first_parts;
    }
    return most;
}

void lay_out_memory(RunPlan& plan, const Ops& ops, std::size_t staging_bytes) {
    const RunSpec& spec = plan.spec;
    plan.store =
        lay_out_store(plan.memory, {spec.dtype, spec.gradient_dtype}, plan.part(), spec.mesh.sharding,
                      static_cast<int>(plan.micro_batches), spec.mesh.tensor_place(), spec.trains);
    plan.sent = bytes_sent(plan.training, unit_bytes(spec, plan.store.units), *plan.lists);
    plan.bytes_of_whole_gradients = bytes_of_whole_gradients(plan);
    std::int64_t norm_blocks = 0;
    for (const UnitLayout& unit : plan.store.units)
        norm_blocks += unit.padded_elements(spec.mesh.data_ranks()) / norm_block_elements;
    plan.activations = lay_out_activations(plan.memory, {.lists = plan.lists.get(),
                                                         .part = plan.part(),
                                                         .in_flight = in_flight(plan),
                                                         .norm_blocks = norm_blocks,
                                                         .recompute = spec.recompute});
    plan.communication = add_bytes(plan.memory, ArenaKind::communication, staging_bytes);
    plan.workspace =
        add_bytes(plan.memory, ArenaKind::workspace,
                  ops.workspace_bytes(workspace_request(spec.model, plan.lists->kinds.front().sizes)));
}

// The plan without the parts that differ between stages.
RunPlan plan_of_whole_pipeline(const RunSpec& spec, std::int64_t micro_batch) {
    RunPlan plan;
    plan.spec = spec;
    plan.micro_batch = micro_batch;
    plan.micro_batches = plan.rank_sequences() / micro_batch;
    const PartSizes sizes = part_sizes(plan);
    plan.outline = std::make_shared<Outline>(outline_of(spec.model));
    plan.lists = std::make_shared<ModelLists>(derive_lists(*plan.outline, sizes));
    plan.pipeline = {.schedule = spec.pipeline_schedule,
                     .stages = spec.mesh.pipeline,
                     .virtual_stages = spec.virtual_stages,
                     .micro_batches = static_cast<int>(plan.micro_batches)};
    plan.parts = parts_of_stages(spec, plan.outline);
    return plan;
}

// The plan of this rank's stage, with the needs of all stages.
RunPlan plan_with(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes, std::int64_t micro_batch) {
    check_micro_batches(spec, micro_batch);
    RunPlan own;
    ListsOfStages lists;
    std::vector<StageNeeds> needs;
    const RunPlan all = plan_of_whole_pipeline(spec, micro_batch);
    ops.require_sizes(workspace_request(spec.model, all.lists->kinds.front().sizes));
    for (int stage = 0; stage < spec.mesh.pipeline; ++stage) {
        RunPlan plan = all;
        plan.spec.mesh.rank = spec.mesh.rank_of(stage, spec.mesh.data_rank(), spec.mesh.tensor_rank());
        build_lists(plan);
        lay_out_memory(plan, ops, staging_bytes);
        lists.add(plan);
        needs.push_back({plan.memory, plan.sent});
        if (stage == spec.mesh.stage()) own = std::move(plan);
    }
    lists.check();
    for (const StageNeeds& stage : needs)
        own.largest_memory = std::max(own.largest_memory, stage.memory.total_bytes());
    own.stages = std::move(needs);
    return own;
}

void check_chunks_of(const RunSpec& spec) {
    if (spec.mesh.pipeline == 1) return;
    check_chunks({.schedule = spec.pipeline_schedule,
                  .stages = spec.mesh.pipeline,
                  .virtual_stages = spec.virtual_stages},
                 spec.model.layers());
}

// ---- the bytes that a step sends, from few layers and micro-batches

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

// Checks the mesh of the plan.
void check_sizes_of(const RunSpec& spec) {
    check_mesh_sizes({.pipeline = spec.mesh.pipeline,
                      .virtual_stages = spec.virtual_stages,
                      .tensor = spec.mesh.tensor,
                      .sequence_parallel = spec.mesh.sequence_parallel},
                     spec.model);
    check_chunks_of(spec);
}

std::int64_t micro_batch_of(const RunSpec& spec) {
    check_global_batch(spec);
    const std::int64_t micro_batch = choose_micro_batch(spec);
    check_groups(spec, micro_batch);
    return micro_batch;
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

std::vector<StagePart> parts_of_pipeline(const RunSpec& spec) {
    check_chunks_of(spec);
    if (spec.mesh.pipeline == 1 || most_micro_batches(spec) == 0) return {};
    return parts_of_stages(spec, std::make_shared<Outline>(outline_of(spec.model)));
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
                const long double few_of_both = sent(*plan), of_turn = sent(*layers_1) - few_of_both,
                                  of_group = sent(*groups_1) - few_of_both,
                                  of_both = sent(*both) - sent(*layers_1) - of_group;
                // Sizes may be absurd. The limit leaves room for the sum of these numbers, which is shown
                // too.
                plan->stages[stage].sent.*kind = static_cast<std::uint64_t>(std::min(
                    0x1p60L, few_of_both + turns * of_turn + groups * of_group + turns * groups * of_both));
            }
        }
        return plan;
    }
}

RunPlan plan_run(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes) {
    check_sizes_of(spec);
    require_possible(spec);
    check_vocabulary(spec.model.vocabulary);
    const std::int64_t micro_batch = micro_batch_of(spec);
    const MakePlan make_plan = [&](const RunSpec& other, std::int64_t sequences) {
        return plan_with(other, ops, staging_bytes, sequences);
    };
    // If the user gave no micro-batch size, the memory decides.
    RunPlan plan = spec.micro_batch_sequences == 0 ? plan_that_fits(spec, make_plan, micro_batch)
                                                   : make_plan(spec, micro_batch);
    if (!fits(spec.machine, plan.largest_memory)) {
        RunSpec any = spec;
        any.micro_batch_sequences = 0;
        const RunPlan smaller = plan_that_fits(any, make_plan, plan.micro_batch);
        std::string other;
        if (!fits(spec.machine, smaller.largest_memory))
            other = what_would_fit(any, make_plan, plan.micro_batch);
        if (!spec.may_exceed_machine) refuse_memory(plan, smaller, other);
        plan.lack = lack_of_memory(plan, other);
    }
    return plan;
}

}  // namespace llmc
