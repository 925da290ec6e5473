#include "llmc/plan/memory_limit.h"

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/plan/micro_batches.h"

namespace llmc {

namespace {

// A bound on what is a slip of the keyboard: it keeps sizes inside 64 bits.
constexpr double most_memory = 0x1p47;

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

// The end of a sentence on what a process needs.
std::string against_the_machine(const MachineMemory& machine) {
    return fmt::format(
        "{}, and {}", machine.processes > 1 ? fmt::format(" in each of {} processes", machine.processes) : "",
        machine.bytes == 0 ? "no machine has that"
                           : fmt::format("{} has {} free", machine.name, human_bytes(machine.bytes)));
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

}  // namespace

bool fits(const MachineMemory& machine, std::size_t bytes) {
    return bytes * static_cast<std::size_t>(machine.processes) <= available(machine);
}

void require_possible(const RunSpec& spec) {
    const double least = least_memory(spec);
    const bool has_plan = least <= most_memory && most_micro_batches(spec) > 0;
    if (has_plan || least * spec.machine.processes <= static_cast<double>(available(spec.machine))) return;
    const std::optional<Size> size = largest_size(spec);
    user_error("{}: {} parameters and a micro-batch need at least {} of memory{}; give a smaller {}",
               size ? fmt::format("{} {}", size->option, size->value) : "too large a model",
               human_count(parameters_about(spec.config)), human_bytes(least),
               against_the_machine(spec.machine), size ? size->option : "--model or --micro-batch-size");
}

void refuse_memory(const RunPlan& plan, const RunPlan& smaller, const std::string& other) {
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

}  // namespace llmc
