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
constexpr std::size_t most_memory = std::size_t{1} << 47;

// What a process needs at least, whatever the sizes: weights, gradients and moments, and what the layers keep of a micro-batch.
// Parts that are alike are laid out once.
std::size_t least_memory(const RunSpec& spec) {
    const Sharding& sharding = spec.mesh.sharding;
    const PartSizes sizes{.split = spec.mesh.split(),
                          .batch = std::max<std::int64_t>(1, spec.micro_batch_sequences),
                          .dtype = spec.dtype};
    MemoryLayout layout;
    Scratch scratch;
    for (const Model::Run& run : spec.model.runs) {
        UnitSpec own{run.part.name, {}};
        for (const PartParameter& parameter : run.part.parameters) {
            if (!parameter.is_tied) own.params.push_back(parameter.spec);
        }
        const std::int64_t elements = UnitLayout(own, spec.mesh.tensor_place()).elements();
        const auto add = [&](ArenaKind arena, DType dtype, bool whole) {
            layout.add(arena, own.name, dtype, {whole ? elements : elements / sharding.shards}, run.count);
        };
        add(ArenaKind::parameters, spec.dtype, sharding.keeps_parameters_whole());
        add(ArenaKind::gradients, spec.gradient_dtype, sharding.keeps_gradients_whole());
        if (spec.dtype != DType::fp32) add(ArenaKind::master, DType::fp32, sharding.keeps_optimizer_whole());
        for (int moment = 0; moment < 2; ++moment)
            add(ArenaKind::moments, DType::fp32, sharding.keeps_optimizer_whole());
        if (!run.is_layer) continue;
        const PartLists lists = derive_lists(run.part, sizes, scratch);
        const std::int64_t recomputing = run.count / spec.recompute.every;  // the last layer of each group
        for (std::size_t i = 0; i < lists.kept.size(); ++i) {
            const PartBuffer& kept = lists.kept[i];
            const bool is_kept = lists.is_kept(i, spec.recompute.kind);
            layout.add(ArenaKind::activations, kept.name, kept.dtype, kept.shape,
                       run.count - (is_kept ? 0 : recomputing));
        }
    }
    return layout.total_bytes();
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
    return machine.bytes == 0 ? most_memory : machine.bytes;
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
    const std::size_t least = least_memory(spec);
    const bool has_plan = least <= most_memory && most_micro_batches(spec) > 0;
    if (has_plan || least <= available(spec.machine) / static_cast<std::size_t>(spec.machine.processes))
        return;
    const std::optional<ModelSize> size = largest_size(spec);
    user_error("{}: {} parameters and a micro-batch need at least {} of memory{}; give a smaller {}",
               size ? fmt::format("--{} {}", size->option, size->value) : "too large a model",
               human_count(static_cast<double>(count_parameters(spec.model))), human_bytes(least),
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
        human_count(static_cast<double>(count_parameters(plan.spec.model))),
        plural(shown.micro_batch, "sequence"), human_bytes(shown.memory.total_bytes()),
        largest_arenas(shown.memory), against_the_machine(machine), advice);
}

}  // namespace llmc
