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

// What a process needs at least, whatever the sizes: weights, gradients and moments, and what the layers keep of a micro-batch.
// Parts that are alike are laid out once.
double least_memory(const RunSpec& spec) {
    const Sharding& sharding = spec.mesh.sharding;
    const auto size = [](DType dtype) { return static_cast<double>(size_of(dtype)); };
    const double parameter =
        size(spec.dtype) * sharding.share_of_parameters() +
        size(spec.gradient_dtype) * sharding.share_of_gradients() +
        (spec.dtype == DType::fp32 ? 2 : 3) * size(DType::fp32) * sharding.share_of_optimizer();
    const PartSizes sizes{.split = spec.mesh.split(),
                          .batch = std::max<std::int64_t>(1, spec.micro_batch_sequences),
                          .dtype = spec.dtype};
    double bytes = parameter * parameters_about(spec.model) / spec.mesh.tensor / spec.mesh.pipeline;
    Scratch scratch;
    for (const Model::Run& run : spec.model.runs) {
        if (!run.is_layer) continue;
        // The last layer of each group; of several kinds in turn, perhaps all of one.
        const std::int64_t recomputing = run.parts.size() > 1 ? run.count : run.count / spec.recompute.every;
        for (const Part& part : run.parts) {
            const PartLists lists = derive_lists(part, sizes, scratch);
            for (std::size_t i = 0; i < lists.kept.size(); ++i) {
                const PartBuffer& kept = lists.kept[i];
                const auto times = static_cast<double>(
                    run.count - (lists.is_kept(i, spec.recompute.kind) ? 0 : recomputing));
                bytes += times * static_cast<double>(kept.shape.elements()) * size(kept.dtype) /
                         spec.mesh.pipeline;
            }
        }
    }
    return bytes;
}

// The option to blame for a run that is too large: the one furthest beyond the largest model that has a name; none if none is.
std::optional<ModelSize> largest_size(const RunSpec& spec) {
    constexpr std::int64_t usual_micro_batch = 16;
    std::vector<ModelSize> sizes = spec.model.sizes;
    sizes.push_back(
        {"micro-batch-size", std::max<std::int64_t>(1, spec.micro_batch_sequences), usual_micro_batch});
    const ModelSize& size = *std::ranges::max_element(sizes, {}, &ModelSize::times);
    return size.times() > 1 ? std::optional(size) : std::nullopt;
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
    return bytes <= available(machine) / static_cast<std::size_t>(machine.processes);
}

void require_possible(const RunSpec& spec) {
    const double least = least_memory(spec);
    const bool has_plan = least <= most_memory && most_micro_batches(spec) > 0;
    if (has_plan || least * spec.machine.processes <= static_cast<double>(available(spec.machine))) return;
    const std::optional<ModelSize> size = largest_size(spec);
    user_error("{}: {} parameters and a micro-batch need at least {} of memory{}; give a smaller {}",
               size ? fmt::format("--{} {}", size->option, size->value) : "too large a model",
               human_count(parameters_about(spec.model)), human_bytes(least),
               against_the_machine(spec.machine),
               size ? fmt::format("--{}", size->option) : "--model or --micro-batch-size");
}

void refuse_memory(const RunPlan& plan, const RunPlan& smaller, const std::string& other) {
    const MachineMemory& machine = plan.spec.machine;
    const bool would_fit = fits(machine, smaller.largest_memory);
    const RunPlan& shown = would_fit ? plan : smaller;
    std::string name = "too large a model", advice = "give a smaller --model";
    if (would_fit) {
        name = fmt::format("--micro-batch-size {}", plan.micro_batch);
        advice = fmt::format("--micro-batch-size {} would fit", smaller.micro_batch);
    } else if (const std::optional<ModelSize> size = largest_size(smaller.spec)) {
        name = fmt::format("--{} {}", size->option, size->value);
        advice = fmt::format("give a smaller --{}", size->option);
    }
    if (!other.empty()) advice += fmt::format("; {} would fit", other);
    user_error(
        "{}: {} parameters and a micro-batch of {} need {} of memory (the largest arenas are {}){}; {}", name,
        human_count(parameters_about(plan.spec.model)), plural(shown.micro_batch, "sequence"),
        human_bytes(shown.memory.total_bytes()), largest_arenas(shown.memory), against_the_machine(machine),
        advice);
}

}  // namespace llmc
