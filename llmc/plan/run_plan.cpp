#include "llmc/plan/run_plan.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/model/head.h"
#include "llmc/parallel/build_step.h"

namespace llmc {

namespace {

// Bounds on what is a slip of the keyboard: they keep sizes inside 64 bits, and a step's list of actions small.
constexpr double most_memory = 0x1p47;
constexpr std::int64_t largest_micro_batch = 1 << 14;
constexpr std::int64_t most_block_passes = 1 << 18;  // micro-batches times layers

// ---- memory

// Of the activations of a block (block.h) and its input: numbers for each token and channel.
double numbers_kept(RecomputeKind kind) {
    switch (kind) {
        case RecomputeKind::none:
            return 16;
        case RecomputeKind::selective:
            return 10;
        case RecomputeKind::block:
            return 1;
    }
    programming_error("an unknown kind of recompute");
}

// What a process needs at least, whatever the sizes: weights, gradients and moments, and what the blocks keep of a
// micro-batch.
double least_memory(const RunSpec& spec) {
    const GPTConfig& config = spec.config;
    const auto element = static_cast<double>(size_of(spec.dtype));
    const Sharding& sharding = spec.mesh.sharding;
    const double parameter =
        element * sharding.share_of_parameters() +
        static_cast<double>(size_of(spec.gradient_dtype)) * sharding.share_of_gradients() +
        (spec.dtype == DType::fp32 ? 8 : 12) * sharding.share_of_optimizer();
    const double tokens = static_cast<double>(std::max<std::int64_t>(1, spec.micro_batch_sequences)) *
                          static_cast<double>(config.sequence_length);
    const std::int64_t whole_groups = config.layers / spec.recompute.every;  // whose last block recomputes
    const auto layers = static_cast<double>(config.layers), recomputing = static_cast<double>(whole_groups);
    const double kept = numbers_kept(RecomputeKind::none) * (layers - recomputing) +
                        numbers_kept(spec.recompute.kind) * recomputing;
    return parameter * parameters_about(config) +
           element * kept * tokens * static_cast<double>(config.channels);
}

// The option to blame for a run that is too large: the one furthest beyond the largest GPT-2; none if none is.
struct Size {
    std::string_view option;
    std::int64_t value;
    double times;
};
std::optional<Size> largest_size(const RunSpec& spec) {
    const GPTConfig& largest = named_models().back().config;
    const auto times = [](std::int64_t size, std::int64_t usual) {
        return static_cast<double>(size) / static_cast<double>(usual);
    };
    const std::int64_t batch = std::max<std::int64_t>(1, spec.micro_batch_sequences);
    const std::array sizes = {
        Size{"--layers", spec.config.layers, times(spec.config.layers, largest.layers)},
        Size{"--channels", spec.config.channels, times(spec.config.channels, largest.channels)},
        Size{"--seq-len", spec.config.sequence_length,
             times(spec.config.sequence_length, largest.sequence_length)},
        Size{"--vocab-size", spec.config.vocabulary, times(spec.config.vocabulary, largest.vocabulary)},
        Size{"--micro-batch-size", batch, times(batch, 16)},
    };
    const Size& size = *std::ranges::max_element(sizes, {}, &Size::times);
    return size.times > 1 ? std::optional(size) : std::nullopt;
}

std::size_t available(const MachineMemory& machine) {
    return machine.bytes == 0 ? static_cast<std::size_t>(most_memory) : machine.bytes;
}

bool fits(const MachineMemory& machine, std::size_t bytes) {
    return bytes * static_cast<std::size_t>(machine.processes) <= available(machine);
}

// The end of a sentence on what a process needs.
std::string against_the_machine(const MachineMemory& machine) {
    return fmt::format(
        "{}, and {}", machine.processes > 1 ? fmt::format(" in each of {} processes", machine.processes) : "",
        machine.bytes == 0 ? "no machine has that"
                           : fmt::format("{} has {} free", machine.name, human_bytes(machine.bytes)));
}

// Sizes that no machine could bear are refused by an estimate: they cannot even be planned.
void require_possible(const RunSpec& spec) {
    const double least = least_memory(spec);
    const bool has_plan = least <= most_memory && spec.config.layers <= most_block_passes;
    if (has_plan || least * spec.machine.processes <= static_cast<double>(available(spec.machine))) return;
    const std::optional<Size> size = largest_size(spec);
    user_error("{}: {} parameters and a micro-batch need at least {} of memory{}; give a smaller {}",
               size ? fmt::format("{} {}", size->option, size->value) : "too large a model",
               human_count(parameters_about(spec.config)), human_bytes(least),
               against_the_machine(spec.machine), size ? size->option : "--model or --micro-batch-size");
}

// "moments 949.4 MiB, master 474.7 MiB and activations 98.3 MiB"
std::string largest_arenas(const MemoryLayout& memory) {
    auto arenas = all_arenas;
    std::ranges::stable_sort(arenas, std::greater(), [&](ArenaKind kind) { return memory.bytes(kind); });
    const auto text = [&](std::size_t i) {
        return fmt::format("{} {}", name_of(arenas[i]), human_bytes(memory.bytes(arenas[i])));
    };
    return fmt::format("{}, {} and {}", text(0), text(1), text(2));
}

// `smaller`: with the largest micro-batch that would fit, or the smallest there is. `other`: options with which a run would
// fit that does not with any micro-batch; empty if there are none.
[[noreturn]] void refuse_memory(const RunPlan& plan, const RunPlan& smaller, const std::string& other) {
    const MachineMemory& machine = plan.spec.machine;
    const bool would_fit = fits(machine, smaller.largest_memory);
    const RunPlan& shown = would_fit ? plan : smaller;
    std::string name = "too large a model", advice = "give a smaller --model";
    if (would_fit) {
        name = fmt::format("--micro-batch-size {}", plan.micro_batch);
        advice = fmt::format("--micro-batch-size {} would fit", smaller.micro_batch);
    } else if (const std::optional<Size> size = largest_size(smaller.spec)) {
        name = fmt::format("{} {}", size->option, size->value);
        advice = fmt::format("give a smaller {}", size->option);
    }
    if (!other.empty()) advice += fmt::format("; {} would fit", other);
    user_error(
        "{}: {} parameters and a micro-batch of {} need {} of memory (the largest arenas are {}){}; {}", name,
        human_count(parameters_about(plan.spec.config)), plural(shown.micro_batch, "sequence"),
        human_bytes(shown.memory.total_bytes()), largest_arenas(shown.memory), against_the_machine(machine),
        advice);
}

// Tokens and targets are int32, and the vocabulary is rounded up.
void check_vocabulary(std::int64_t vocabulary) {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / 128 * 128;
    if (vocabulary > most) user_error("--vocab-size {} is out of range; give 1 to {}", vocabulary, most);
}

// ---- the global batch

// The nearest positive multiples around `value`, as "1024 or 1536".
std::string multiples_near(std::int64_t value, std::int64_t multiple) {
    const std::int64_t below = value / multiple * multiple;
    return below == 0 ? std::to_string(multiple) : fmt::format("{} or {}", below, below + multiple);
}

void check_global_batch(const RunSpec& spec) {
    const std::int64_t T = spec.config.sequence_length, ranks = spec.mesh.data_ranks();
    if (spec.global_batch_tokens < 1 || spec.global_batch_tokens > std::int64_t{1} << 40) {
        user_error("--global-batch-tokens {} is out of range; give {} to {}", spec.global_batch_tokens,
                   T * ranks, std::int64_t{1} << 40);
    }
    if (spec.global_batch_tokens % (T * ranks) != 0) {
        user_error(
            "--global-batch-tokens {} is not a multiple of {} ({} tokens a sequence x {} data-parallel "
            "process{}); try {}",
            spec.global_batch_tokens, T * ranks, T, ranks, ranks == 1 ? "" : "es",
            multiples_near(spec.global_batch_tokens, T * ranks));
    }
}

// The largest divisor of `n` that is at most `limit`.
std::int64_t largest_divisor(std::int64_t n, std::int64_t limit) {
    for (std::int64_t d = std::min(n, limit); d > 1; --d) {
        if (n % d == 0) return d;
    }
    return 1;
}

// The largest micro-batch of at most so many sequences. In a pipeline, where the batch allows it, one that makes micro-batches
// in groups of as many as there are stages: with fewer some stage has nothing to do, and interleaved takes no others.
std::int64_t best_micro_batch(const RunSpec& spec, std::int64_t limit) {
    const std::int64_t sequences = spec.rank_sequences(), stages = spec.mesh.pipeline;
    return largest_divisor(sequences % stages == 0 ? sequences / stages : sequences, limit);
}

void check_groups(const RunSpec& spec, std::int64_t micro_batch) {
    const std::int64_t sequences = spec.rank_sequences(), stages = spec.mesh.pipeline;
    if (spec.virtual_stages == 1 || sequences / micro_batch % stages == 0) return;
    const auto refuse = [&](const std::string& why, const std::string& advice) {
        user_error(
            "--pipeline-schedule interleaved takes micro-batches in groups of --pipeline-parallel {}, and "
            "{}; "
            "try {}, or --pipeline-schedule 1f1b --virtual-stages 1",
            stages, why, advice);
    };
    if (sequences % stages == 0) {
        refuse(fmt::format("--micro-batch-size {} makes {} of a step", micro_batch, sequences / micro_batch),
               fmt::format("--micro-batch-size {}", best_micro_batch(spec, micro_batch)));
    }
    const std::int64_t group = spec.config.sequence_length * spec.mesh.data_ranks() * stages;
    refuse(fmt::format("--global-batch-tokens {} makes {} of a step at most", spec.global_batch_tokens,
                       sequences),
           fmt::format("--global-batch-tokens {}", multiples_near(spec.global_batch_tokens, group)));
}

std::int64_t choose_micro_batch(const RunSpec& spec) {
    const std::int64_t sequences = spec.rank_sequences(), given = spec.micro_batch_sequences;
    if (given > largest_micro_batch) {
        user_error("--micro-batch-size {} is out of range; give 1 to {}", given, largest_micro_batch);
    }
    if (given == 0) {
        return best_micro_batch(
            spec, std::max<std::int64_t>(1, spec.usual_micro_batch_tokens / spec.config.sequence_length));
    }
    if (sequences % given != 0) {
        user_error(
            "--micro-batch-size {} does not divide the {} sequence{} of each process (--global-batch-tokens "
            "{}); try --micro-batch-size {}",
            given, sequences, sequences == 1 ? "" : "s", spec.global_batch_tokens,
            largest_divisor(sequences, given));
    }
    return given;
}

// Of a step.
std::int64_t most_micro_batches(const RunSpec& spec) { return most_block_passes / spec.config.layers; }

void check_micro_batches(const RunPlan& plan) {
    const std::int64_t most = most_micro_batches(plan.spec);
    if (most == 0) {
        user_error("--layers {} is out of range; give 1 to {}", plan.spec.config.layers, most_block_passes);
    }
    if (plan.micro_batches > most) {
        user_error(
            "--global-batch-tokens {} makes {} micro-batches a step, more than the {} that {} layers allow; "
            "try a larger --micro-batch-size, more processes or fewer tokens",
            plan.spec.global_batch_tokens, plan.micro_batches, most, plan.spec.config.layers);
    }
}

BlockSizes block_sizes(const RunPlan& plan) {
    return {.config = plan.spec.config,
            .split = plan.spec.mesh.split(),
            .batch = plan.micro_batch,
            .dtype = plan.spec.dtype};
}

std::int64_t rows_of_logits(const RunPlan& plan) {
    return head_rows(block_sizes(plan), plan.spec.logits_bytes);
}

WorkspaceRequest workspace_request(const RunPlan& plan) {
    const GPTConfig& config = plan.spec.config;
    return {.batch = plan.micro_batch,
            .sequence = config.sequence_length,
            .channels = config.channels,
            .heads = plan.spec.mesh.split().heads(config),
            .largest_matmul_channels =
                std::max(4 * config.channels, plan.spec.mesh.split().padded_vocabulary(config)),
            .head_rows = rows_of_logits(plan),
            .dtype = plan.spec.dtype,
            .vocabulary = plan.spec.mesh.split().padded_vocabulary(config)};
}

// Memory without a type of its own, in fp32 words.
BufferId add_bytes(MemoryLayout& memory, ArenaKind arena, std::size_t bytes) {
    return memory.add(arena, std::string(name_of(arena)), DType::fp32,
                      {static_cast<std::int64_t>((bytes + 3) / 4)});
}

std::vector<UnitBytes> unit_bytes(const RunSpec& spec, const StoreLayout& store) {
    std::vector<UnitBytes> bytes;
    for (const UnitLayout& unit : store.units) {
        const auto elements = static_cast<std::uint64_t>(unit.padded_elements(spec.mesh.data_ranks()));
        const auto replicated = static_cast<std::uint64_t>(unit.elements() - unit.replicated_begin());
        bytes.push_back({.parameters = elements * size_of(spec.dtype),
                         .gradients = elements * size_of(spec.gradient_dtype),
                         .replicated_gradients = replicated * size_of(spec.gradient_dtype),
                         .gradient_size = size_of(spec.gradient_dtype)});
    }
    return bytes;
}

ActivationBytes activation_bytes(const RunPlan& plan) {
    const auto tokens = static_cast<std::uint64_t>(plan.micro_batch * plan.spec.config.sequence_length);
    const auto channels = static_cast<std::uint64_t>(plan.spec.config.channels);
    return {.stream = tokens * channels * size_of(plan.spec.dtype), .statistics = tokens * 3 * sizeof(float)};
}

std::size_t bytes_of_whole_gradients(const RunPlan& plan) {
    Sharding sharding = plan.spec.mesh.sharding;
    if (!sharding.holds_back_gradients()) return 0;
    sharding.reduces_each_micro_batch = true;
    MemoryLayout otherwise;
    lay_out_store(otherwise, plan.spec.config, {plan.spec.dtype, plan.spec.gradient_dtype}, plan.part(),
                  sharding, static_cast<int>(plan.micro_batches), plan.spec.mesh.tensor_place());
    const std::size_t whole = plan.memory.bytes(ArenaKind::gradients);
    return whole - std::min(whole, otherwise.bytes(ArenaKind::gradients));
}

// ---- the pipeline

std::vector<StagePart> parts_of_stages(const RunSpec& spec) {
    const auto layers = static_cast<int>(spec.config.layers);
    if (spec.mesh.pipeline == 1) return {whole_model(layers)};
    const PartCosts costs = part_costs(spec.config);
    const int chunks = spec.mesh.pipeline * spec.virtual_stages;
    const std::vector<BlockRange> blocks =
        spec.pipeline_layers.empty() ? stages_of_layers(layers, chunks, costs)
                                     : parse_pipeline_layers(spec.pipeline_layers, layers, chunks, costs);
    std::vector<StagePart> parts;
    for (int stage = 0; stage < spec.mesh.pipeline; ++stage)
        parts.push_back(part_of_stage(blocks, spec.mesh.pipeline, stage));
    return parts;
}

// Of a stage.
StepSpec step_spec(const RunPlan& plan, int stage) {
    return {.part = plan.parts[static_cast<std::size_t>(stage)],
            .stage = stage,
            .pipeline = plan.pipeline,
            .sharding = plan.spec.mesh.sharding,
            .tensor = plan.spec.mesh.split(),
            .rounds_gradients = plan.spec.gradient_dtype != DType::fp32,
            .recompute = plan.spec.recompute};
}

// Several at once, so that all stages have something to do.
StepSpec evaluation_spec(const RunPlan& plan, int stage) {
    StepSpec spec = step_spec(plan, stage);
    spec.pipeline.micro_batches = spec.pipeline.stages;
    return spec;
}

StepSpec one_alone(const RunPlan& plan, int stage) {
    StepSpec spec = step_spec(plan, stage);
    spec.pipeline.micro_batches = 1;
    return spec;
}

void build_lists(RunPlan& plan) {
    const int stage = plan.spec.mesh.stage();
    plan.training = build_training_step(step_spec(plan, stage));
    plan.evaluation = build_evaluation_step(evaluation_spec(plan, stage));
    plan.generation = build_generation_step(one_alone(plan, stage));
    plan.diagnosis = build_evaluation_step(one_alone(plan, stage));
    plan.publication = build_publication(step_spec(plan, stage));
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
                                         &RunPlan::diagnosis, &RunPlan::publication};
    std::array<std::vector<Step>, kinds.size()> lists_;
};

// ---- the plan

// What the lists of a stage use at once.
BuffersInFlight in_flight(const RunPlan& plan) {
    BuffersInFlight most;
    for (const Step* list : {&plan.training, &plan.evaluation, &plan.generation, &plan.diagnosis}) {
        const BuffersInFlight of = buffers_in_flight(*list);
        most.slots = std::max(most.slots, of.slots);
        most.chunk_inputs = std::max(most.chunk_inputs, of.chunk_inputs);
        most.residual_gradients = std::max(most.residual_gradients, of.residual_gradients);
        most.tokens = std::max(most.tokens, of.tokens);
    }
    return most;
}

void lay_out_memory(RunPlan& plan, const Ops& ops, std::size_t staging_bytes) {
    const RunSpec& spec = plan.spec;
    plan.store =
        lay_out_store(plan.memory, spec.config, {spec.dtype, spec.gradient_dtype}, plan.part(),
                      spec.mesh.sharding, static_cast<int>(plan.micro_batches), spec.mesh.tensor_place());
    plan.sent = bytes_sent(plan.training, unit_bytes(spec, plan.store), activation_bytes(plan));
    plan.bytes_of_whole_gradients = bytes_of_whole_gradients(plan);
    std::int64_t norm_blocks = 0;
    for (const UnitLayout& unit : plan.store.units)
        norm_blocks += unit.padded_elements(spec.mesh.data_ranks()) / norm_block_elements;
    plan.activations = lay_out_activations(plan.memory, {.sizes = block_sizes(plan),
                                                         .part = plan.part(),
                                                         .splits_backward = plan.pipeline.splits_backward(),
                                                         .in_flight = in_flight(plan),
                                                         .head_rows = rows_of_logits(plan),
                                                         .norm_blocks = norm_blocks,
                                                         .recompute = spec.recompute});
    plan.communication = add_bytes(plan.memory, ArenaKind::communication, staging_bytes);
    plan.workspace =
        add_bytes(plan.memory, ArenaKind::workspace, ops.workspace_bytes(workspace_request(plan)));
}

// With micro-batches of so many sequences, whatever memory that takes, for this rank's stage.
RunPlan plan_of_stage(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes,
                      std::int64_t micro_batch) {
    RunPlan plan;
    plan.spec = spec;
    plan.micro_batch = micro_batch;
    plan.micro_batches = plan.rank_sequences() / micro_batch;
    check_micro_batches(plan);
    ops.require_sizes(workspace_request(plan));
    plan.pipeline = {.schedule = spec.pipeline_schedule,
                     .stages = spec.mesh.pipeline,
                     .virtual_stages = spec.virtual_stages,
                     .micro_batches = static_cast<int>(plan.micro_batches)};
    if (spec.mesh.pipeline > 1) check_pipeline(plan.pipeline, spec.config.layers);
    plan.parts = parts_of_stages(spec);
    build_lists(plan);
    lay_out_memory(plan, ops, staging_bytes);
    return plan;
}

// The same, knowing what all stages need.
RunPlan plan_with(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes, std::int64_t micro_batch) {
    RunPlan own;
    ListsOfStages lists;
    std::vector<StageNeeds> needs;
    for (int stage = 0; stage < spec.mesh.pipeline; ++stage) {
        RunSpec there = spec;
        there.mesh.rank = spec.mesh.rank_of(stage, spec.mesh.data_rank(), spec.mesh.tensor_rank());
        RunPlan plan = plan_of_stage(there, ops, staging_bytes, micro_batch);
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

// With the largest micro-batches, of at most so many sequences, that fit the memory; with the smallest if none do.
RunPlan plan_that_fits(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes,
                       std::int64_t micro_batch) {
    RunPlan plan = plan_with(spec, ops, staging_bytes, micro_batch);
    while (micro_batch > 1 && !fits(spec.machine, plan.largest_memory)) {
        micro_batch = best_micro_batch(spec, micro_batch - 1);
        if (spec.rank_sequences() / micro_batch > most_micro_batches(spec)) break;
        plan = plan_with(spec, ops, staging_bytes, micro_batch);
    }
    return plan;
}

// The first stage of ZeRO at which the run would fit, beyond the one that was asked for.
std::optional<int> stage_that_fits(RunSpec spec, const Ops& ops, std::size_t staging_bytes,
                                   std::int64_t micro_batch) {
    while (const auto next = spec.mesh.sharding.next_stage(spec.usual_reduction)) {
        spec.mesh.sharding = *next;
        if (fits(spec.machine, plan_that_fits(spec, ops, staging_bytes, micro_batch).largest_memory))
            return next->stage;
    }
    return std::nullopt;
}

// The options with which the run would fit, the one that costs least first: recompute, then ZeRO, then both.
std::string what_would_fit(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes,
                           std::int64_t micro_batch) {
    constexpr Recompute all{.kind = RecomputeKind::block};
    RunSpec recomputing = spec;
    recomputing.recompute = all;
    const bool recomputes_all = spec.recompute == all;
    std::string recompute =
        fmt::format("--recompute block{}", spec.recompute.every > 1 ? " --recompute-every 1" : "");
    if (!recomputes_all &&
        fits(spec.machine, plan_that_fits(recomputing, ops, staging_bytes, micro_batch).largest_memory))
        return recompute;
    if (const auto stage = stage_that_fits(spec, ops, staging_bytes, micro_batch))
        return fmt::format("--zero-stage {}", *stage);
    if (recomputes_all) return "";
    if (const auto stage = stage_that_fits(recomputing, ops, staging_bytes, micro_batch))
        return fmt::format("{} with --zero-stage {}", recompute, *stage);
    return "";
}

}  // namespace

RunPlan plan_run(const RunSpec& spec, const Ops& ops, std::size_t staging_bytes) {
    check_config(spec.config);
    check_tensor_split(spec.mesh.split(), spec.config);
    require_possible(spec);
    check_vocabulary(spec.config.vocabulary);
    check_global_batch(spec);
    const std::int64_t micro_batch = choose_micro_batch(spec);
    check_groups(spec, micro_batch);
    // The memory decides, where nobody else has.
    RunPlan plan = spec.micro_batch_sequences == 0 ? plan_that_fits(spec, ops, staging_bytes, micro_batch)
                                                   : plan_with(spec, ops, staging_bytes, micro_batch);
    if (!fits(spec.machine, plan.largest_memory)) {
        RunSpec any = spec;
        any.micro_batch_sequences = 0;
        const RunPlan smaller = plan_that_fits(any, ops, staging_bytes, plan.micro_batch);
        std::string other;
        if (!fits(spec.machine, smaller.largest_memory))
            other = what_would_fit(any, ops, staging_bytes, plan.micro_batch);
        refuse_memory(plan, smaller, other);
    }
    return plan;
}

}  // namespace llmc
