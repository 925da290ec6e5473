#include "llmc/plan/memory_limit.h"

#include <fmt/core.h>
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

// A larger value is a typing error. The limit keeps sizes within 64 bits.
constexpr double most_memory = 0x1p47;

// A lower bound of a process's memory for any sizes: weights and moments (unless they are on disk), gradients, and
// the kept activations of a micro-batch. A repeated part is laid out once and counted for each repetition.
double least_memory(const RunSpec& spec) {
    const Sharding& sharding = spec.mesh.sharding;
    const auto size = [](DType dtype) { return static_cast<double>(size_of(dtype)); };
    const double state = sharding.offload.has_state()
                             ? 0
                             : spec.store_dtypes().moment_bytes() +
                                   (spec.store_dtypes().keeps_master() ? size(DType::fp32) : 0);
    const double parameter = sharding.offload.has_parameters() ? 0 : sharding.share_of_parameters(),
                 trained = size(spec.gradient_dtype) * sharding.share_of_gradients() +
                           state * sharding.share_of_optimizer();
    const PartSizes sizes{.split = spec.mesh.split(),
                          .batch = std::max<std::int64_t>(1, spec.micro_batch_sequences),
                          .dtype = spec.dtype};
    double bytes = (parameter * parameter_bytes_about(spec.model, spec.dtype) +
                    trained * parameters_about(spec.model, true)) /
                   spec.mesh.tensor / spec.mesh.pipeline;
    Scratch scratch;
    for (const Model::Run& run : spec.model.runs) {
        if (!run.is_layer) continue;
        // One layer in recompute.every recomputes. If kinds of layers alternate, all recomputing layers may
        // be of one kind, so this assumes that all of each kind recompute.
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

constexpr std::string_view micro_batch_option = "micro-batch-size";

// The option to blame for a run that is too large: the one that exceeds the largest named model by the
// largest factor. Empty if none exceeds it.
std::optional<ModelSize> largest_size(const RunSpec& spec) {
    constexpr std::int64_t typical_micro_batch = 16;
    std::vector<ModelSize> sizes = spec.model.sizes;
    sizes.push_back(
        {micro_batch_option, std::max<std::int64_t>(1, spec.micro_batch_sequences), typical_micro_batch});
    const ModelSize& size = *std::ranges::max_element(sizes, {}, &ModelSize::times);
    return size.times() > 1 ? std::optional(size) : std::nullopt;
}

// The setting to blame, and the option to change: "--layers 1000" and "--layers".
struct Blame {
    std::string setting, option;
};
Blame blame_for(const RunSpec& spec) {
    const std::optional<ModelSize> size = largest_size(spec);
    const bool is_of_batch = size && size->option == micro_batch_option;
    if (!spec.model_name.empty() && !is_of_batch) return {"--model " + spec.model_name, "--model"};
    if (!size) return {"too large a model", "--model"};
    return {fmt::format("--{} {}", size->option, size->value), fmt::format("--{}", size->option)};
}

std::size_t available(const MachineMemory& machine) {
    return machine.bytes == 0 ? static_cast<std::size_t>(most_memory) : machine.bytes;
}

// The end of a sentence about the memory that a process needs.
std::string against_the_machine(const MachineMemory& machine) {
    return fmt::format(
        "{}, but {}", machine.processes > 1 ? fmt::format(" in each of {} processes", machine.processes) : "",
        machine.bytes == 0 ? "no machine has so much"
                           : fmt::format("{} has {} free", machine.name, human_bytes(machine.bytes)));
}

// "moments 949.4 MiB, master 474.7 MiB and activations 98.3 MiB"
std::string largest_arenas(const ArenaSizes& memory) {
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

bool fits_host(const MachineMemory& machine, std::size_t bytes) {
    return machine.host_bytes == 0 ||
           bytes <= machine.host_bytes / static_cast<std::size_t>(machine.host_processes);
}

void require_possible(const RunSpec& spec) {
    const double least = least_memory(spec);
    const bool has_plan = least <= most_memory && most_micro_batches(spec) > 0;
    if (has_plan || least * spec.machine.processes <= static_cast<double>(available(spec.machine))) return;
    const Blame blame = blame_for(spec);
    user_error("{}: {} parameters and a micro-batch need at least {} of memory{}; give a smaller {}",
               blame.setting, human_count(parameters_about(spec.model)), human_bytes(least),
               against_the_machine(spec.machine), blame.option);
}

namespace {

std::optional<std::int64_t> smaller_micro_batch(const RunSpec& spec, std::int64_t micro_batch) {
    if (micro_batch == 1) return std::nullopt;
    const std::int64_t smaller = best_micro_batch(spec, micro_batch - 1);
    if (spec.rank_sequences() / smaller > most_micro_batches(spec)) return std::nullopt;
    return smaller;
}

}  // namespace

RunNeeds needs_that_fit(const RunSpec& spec, const FindNeeds& find, std::int64_t micro_batch) {
    RunNeeds needs = find(spec, micro_batch);
    while (!fits(spec.machine, needs.largest_memory())) {
        const auto smaller = smaller_micro_batch(spec, needs.micro_batch);
        if (!smaller) break;
        needs = find(spec, *smaller);
    }
    return needs;
}

namespace {

// Whether the run fits with some micro-batch of at most `micro_batch` sequences.
bool would_fit(const RunSpec& spec, const FindNeeds& find, std::int64_t micro_batch) {
    RunSpec smallest = spec;
    smallest.micro_batch_sequences = 1;
    const Offload& offload = spec.mesh.sharding.offload;  // takes gradients along
    if (spec.trains && !offload.has_state() && !offload.has_parameters() &&
        !fits(spec.machine, static_cast<std::size_t>(std::min(least_memory(smallest), most_memory))))
        return false;
    for (std::optional size = micro_batch; size; size = smaller_micro_batch(spec, *size)) {
        if (!fits(spec.machine, find.least(spec, *size))) continue;
        const RunNeeds needs = find(spec, *size);
        if (fits(spec.machine, needs.largest_memory()))
            return fits_host(spec.machine, needs.largest_host_memory());
    }
    return false;
}

// The first ZeRO stage beyond the given one at which the run would fit.
std::optional<int> stage_that_fits(RunSpec spec, const FindNeeds& find, std::int64_t micro_batch) {
    while (const auto next = spec.mesh.sharding.next_stage(spec.default_reduction)) {
        spec.mesh.sharding = *next;
        if (would_fit(spec, find, micro_batch)) return next->stage;
    }
    return std::nullopt;
}

// Tries 2 to 16 times as many GPUs, if the batch can be divided among them, and writes their number. Empty if none of
// these fit.
std::string gpus_that_fit(const RunSpec& spec, const FindNeeds& find, std::int64_t micro_batch, int& gpus) {
    constexpr int most_times = 16;
    if (!spec.machine.more_processes_bring_more || !spec.trains) return "";
    for (int times = 2; times <= most_times; times *= 2) {
        RunSpec wider = spec;
        wider.mesh.sharding.shards *= times;
        if (wider.global_sequences() % wider.mesh.data_ranks() != 0) break;
        // Begin with the given ZeRO stage, and go to higher stages as necessary.
        const std::int64_t first = best_micro_batch(wider, micro_batch);
        if (wider.pipeline_schedule == PipelineSchedule::interleaved &&
            wider.rank_sequences() / first % wider.mesh.pipeline != 0)
            break;
        std::optional<int> stage;
        if (wider.mesh.sharding.stage > 0 && would_fit(wider, find, first)) stage = wider.mesh.sharding.stage;
        if (!stage) stage = stage_that_fits(wider, find, first);
        if (!stage) continue;
        gpus = wider.mesh.world();
        return fmt::format("--zero-stage {}", *stage);
    }
    return "";
}

// The host's memory beside a GPU, or a disk, for the optimizer's state, and then for parameters.
std::string offload_that_fits(RunSpec run, const std::function<bool(const RunSpec&)>& would_do, Tier tier) {
    const Offload given = run.mesh.sharding.offload;
    // The state of whole matrices is not kept on a disk.
    const bool moves_state = run.trains && run.moments_dtype != DType::uint8 &&
                             (tier != Tier::disk || !run.store_dtypes().chosen().others);
    const Tier state = moves_state ? std::max(given.state, tier) : given.state,
               parameters = std::max(given.parameters, tier);
    const bool has_directory = given.state == Tier::disk || given.parameters == Tier::disk;
    for (const Tier of_parameters : {given.parameters, parameters}) {
        Offload& offload = run.mesh.sharding.offload;
        offload.state = state;
        offload.parameters = of_parameters;
        std::string options;
        const auto say = [&](std::string_view what, Tier before, Tier now) {
            if (now != before)
                options += fmt::format("{}--offload-{} {}", options.empty() ? "" : " ", what,
                                       now == Tier::host ? "cpu" : "nvme");
        };
        say("optimizer", given.state, offload.state);
        say("parameters", given.parameters, offload.parameters);
        if (options.empty()) continue;
        run.mesh.sharding.prefetch_units =
            std::max(run.mesh.sharding.prefetch_units, run.mesh.sharding.default_prefetch_units());
        if (would_do(run)) return options + (tier == Tier::disk && !has_directory ? " --nvme-dir DIR" : "");
    }
    return "";
}

std::string options_that_fit(const RunSpec& spec, const FindNeeds& find, std::int64_t micro_batch,
                             int& gpus) {
    constexpr Recompute all{.kind = RecomputeKind::block};
    RunSpec recomputing = spec;
    recomputing.recompute = all;
    const bool recomputes_all = spec.recompute == all;
    std::string recompute =
        fmt::format("--recompute block{}", spec.recompute.every > 1 ? " --recompute-every 1" : "");
    const auto would_do = [&](const RunSpec& other) { return would_fit(other, find, micro_batch); };
    // Tries the run as it is, and then with full recomputation unless that was already given.
    const auto with_either = [&](const auto& options_for) {
        std::string options = options_for(spec);
        if (!options.empty() || recomputes_all) return options;
        options = options_for(recomputing);
        return options.empty() ? options : fmt::format("{} {}", recompute, options);
    };
    if (!recomputes_all && would_do(recomputing)) return recompute;
    std::string options = with_either([&](const RunSpec& run) {
        const auto stage = stage_that_fits(run, find, micro_batch);
        return stage ? fmt::format("--zero-stage {}", *stage) : std::string();
    });
    if (!options.empty()) return options;
    options = with_either([&](RunSpec run) {
        if (run.dtype != DType::bf16 || run.gradient_dtype == DType::bf16 || !run.trains)
            return std::string();
        run.gradient_dtype = DType::bf16;
        return would_do(run) ? std::string("--gradient-dtype bf16") : std::string();
    });
    if (!options.empty()) return options;
    // Of a machine whose memory is known
    for (const Tier tier : {Tier::host, Tier::disk}) {
        if (spec.machine.is_of_cpu ? tier == Tier::host : spec.machine.host_bytes == 0) continue;
        options = with_either([&](const RunSpec& run) { return offload_that_fits(run, would_do, tier); });
        if (!options.empty()) return options;
    }
    if (spec.machine.is_of_cpu) return "";
    return with_either([&](const RunSpec& run) { return gpus_that_fit(run, find, micro_batch, gpus); });
}

// "--micro-batch-size 2 would fit; "
std::string advice_of(const Remedy& remedy) {
    if (remedy.is_enough) return remedy.as_options() + " would fit";
    if (remedy.options.empty()) return "";
    return fmt::format("{}{} would fit", remedy.gpus > 0 ? fmt::format("{} GPUs and ", remedy.gpus) : "",
                       remedy.options);
}

}  // namespace

std::string Remedy::as_options() const {
    if (is_enough) return fmt::format("--micro-batch-size {}", smaller.micro_batch);
    return gpus > 0 ? fmt::format("--processes {} {}", gpus, options) : options;
}

Remedy remedy_of(const RunNeeds& run, const FindNeeds& find) {
    RunSpec any = run.spec;
    any.micro_batch_sequences = 0;
    Remedy remedy{.smaller = needs_that_fit(any, find, run.micro_batch)};
    remedy.is_enough = fits(any.machine, remedy.smaller.largest_memory());
    if (!remedy.is_enough) remedy.options = options_that_fit(any, find, run.micro_batch, remedy.gpus);
    return remedy;
}

void refuse_memory(const RunNeeds& run, const Remedy& remedy) {
    const RunNeeds& shown = remedy.is_enough ? run : remedy.smaller;
    const Blame blame = blame_for(remedy.smaller.spec);
    const std::string name =
        remedy.is_enough ? fmt::format("--micro-batch-size {}", run.micro_batch) : blame.setting;
    const std::string more = advice_of(remedy);
    const std::string advice =
        remedy.is_enough ? more
                         : fmt::format("give a smaller {}{}{}", blame.option, more.empty() ? "" : "; ", more);
    const ArenaSizes& memory = shown.stages[static_cast<std::size_t>(shown.fullest_stage())].memory;
    user_error(
        "{}: {} parameters and a micro-batch of {} need {} of memory (the largest arenas are {}){}; {}", name,
        human_count(parameters_about(run.spec.model)), plural(shown.micro_batch, "sequence"),
        human_bytes(memory.total_bytes()), largest_arenas(memory), against_the_machine(run.spec.machine),
        advice);
}

std::string lack_of_copy(std::size_t bytes) {
    return fmt::format("checkpoints are saved between steps: there is no room for a copy of {} per process",
                       human_bytes(bytes));
}

std::string lack_of_host_memory(const RunNeeds& run, const FindNeeds& find) {
    const MachineMemory& machine = run.spec.machine;
    const std::string advice = offload_that_fits(
        run.spec, [&](const RunSpec& other) { return would_fit(other, find, run.micro_batch); }, Tier::disk);
    return fmt::format(
        "what is offloaded needs {} of the host's memory{}, but this machine has {} free; {}",
        human_bytes(run.largest_host_memory()),
        machine.host_processes > 1 ? fmt::format(" in each of {} processes", machine.host_processes) : "",
        human_bytes(machine.host_bytes),
        advice.empty() ? "offload less, or take more machines" : fmt::format("a disk holds it: {}", advice));
}

std::string lack_of_memory(const RunNeeds& run, const Remedy& remedy) {
    const MachineMemory& machine = run.spec.machine;
    const std::string advice = remedy.is_enough ? "" : advice_of(remedy);
    return fmt::format(
        "does not fit here: needs {}{}, {} free{}{}", human_bytes(run.largest_memory()),
        machine.processes > 1 ? fmt::format(" in each of {} processes", machine.processes) : "",
        human_bytes(available(machine)), advice.empty() ? "" : "; ", advice);
}

}  // namespace llmc
