#include "llmc/planner/levers.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "llmc/plan/micro_batches.h"

namespace llmc {

namespace {

// The largest n of 1 to `most` with fits(n), which holds for all smaller ones too; 0: none.
std::int64_t largest(std::int64_t most, const std::function<bool(std::int64_t)>& fits) {
    std::int64_t low = 0, high = 1;  // fits(low), as far as known
    while (high <= most && fits(high)) {
        low = high;
        high *= 2;
    }
    high = std::min(high, most + 1);
    while (high - low > 1) {
        const std::int64_t middle = low + (high - low) / 2;
        (fits(middle) ? low : high) = middle;
    }
    return low;
}

// The options that take less memory than those of the run, each with the option that it changes.
std::vector<std::pair<std::string_view, std::string>> smaller_options(const PlannedRun& run) {
    const RunSpec& spec = *run.spec;
    const Sharding& sharding = spec.mesh.sharding;
    const std::int64_t micro_batch = run.needs->micro_batch;
    std::vector<std::pair<std::string_view, std::string>> options;
    const auto add = [&](bool applies, std::string_view option, const auto& value) {
        if (applies) options.emplace_back(option, fmt::format("--{} {}", option, value));
    };
    for (int stage = sharding.stage + 1; stage <= 3; ++stage)
        add(spec.mesh.data_ranks() > 1, "zero-stage", stage);
    add(sharding.stage > 0 && sharding.replicas > 1, "zero-shard-size", spec.mesh.data_ranks());
    add(sharding.holds_back_gradients(), "reduce-every", "micro-batch");
    add(run.options.recompute == "none", "recompute", "selective");
    add(run.options.recompute != "block", "recompute", "block");
    if (micro_batch > 1) {
        const std::int64_t half = largest_divisor(spec.rank_sequences(), micro_batch / 2);
        add(true, "micro-batch-size", half);
        add(half > 1, "micro-batch-size", 1);
    }
    add(spec.dtype == DType::bf16 && spec.gradient_dtype == DType::fp32, "gradient-dtype", "bf16");
    add(spec.moments_dtype == DType::fp32, "moments-dtype", "bf16");
    add(spec.moments_dtype != DType::uint8, "moments-dtype", "8bit");
    add(spec.dtype == DType::bf16 && spec.has_master, "master-dtype", "none");
    add(spec.dtype == DType::fp32, "dtype", "bf16");
    add(run.options.has_adapters() && run.options.base_dtype.empty() && spec.fp8 == Fp8Scaling::none,
        "base-dtype", "nf4");
    const Offload& offload = sharding.offload;
    const auto add_tiers = [&](std::string_view option, Tier now) {
        if (offload.has_own_memory && now == Tier::device) add(true, option, "cpu");
        if (now != Tier::disk) options.emplace_back(option, fmt::format("--{} nvme --nvme-dir DIR", option));
    };
    if (spec.moments_dtype != DType::uint8) add_tiers("offload-optimizer", offload.state);
    add_tiers("offload-parameters", offload.parameters);
    if (spec.mesh.tensor > 1 && !spec.mesh.sequence_parallel)
        options.emplace_back("sequence-parallel", "--sequence-parallel");
    add(2 * spec.mesh.tensor <= run.machines.ranks_of_node, "tensor-parallel", 2 * spec.mesh.tensor);
    add(true, "pipeline-parallel", 2 * spec.mesh.pipeline);
    add(spec.pipeline_schedule == PipelineSchedule::gpipe && spec.mesh.pipeline > 1, "pipeline-schedule",
        "1f1b");
    return options;
}

}  // namespace

Levers levers_of(const PlannedRun& run) {
    const RunSpec& spec = *run.spec;
    const std::int64_t length = spec.model.sequence_length,
                       micro_batches = spec.rank_sequences() / run.needs->micro_batch;
    // Everything that depends on memory or on the mesh by default stays as it is.
    const std::vector<std::string> arguments =
        with_options(run.arguments, fmt::format("--global-batch-tokens {} --micro-batch-size {}",
                                                spec.global_batch_tokens, run.needs->micro_batch));
    const auto fits_with = [&](std::int64_t tokens, std::int64_t sequences) {
        const std::string options =
            fmt::format("--seq-len {} --micro-batch-size {} --global-batch-tokens {}", tokens, sequences,
                        tokens * sequences * micro_batches * spec.mesh.data_ranks());
        return estimate_of(with_options(arguments, options), /*must_fit*/ true).has_value();
    };
    Levers levers;
    levers.micro_batch = largest(1 << 16, [&](std::int64_t size) { return fits_with(length, size); });
    constexpr std::int64_t most_tokens = 1 << 24;
    const std::int64_t unit = std::int64_t{64} * spec.mesh.tensor;
    levers.context =
        unit * largest(most_tokens / unit, [&](std::int64_t n) { return fits_with(n * unit, 1); });

    const double seconds = run.estimate ? run.estimate->expected : 0;
    const auto lever = [&](const std::string& options) -> std::optional<Lever> {
        const auto estimate = estimate_of(with_options(arguments, options), /*must_fit*/ false);
        if (!estimate || estimate->bytes >= run.needs->largest_memory()) return std::nullopt;
        return Lever{options, run.needs->largest_memory() - estimate->bytes, estimate->seconds - seconds,
                     estimate->fits()};
    };
    const auto singles = smaller_options(run);
    for (std::size_t i = 0; i < singles.size(); ++i) {
        if (const auto alone = lever(singles[i].second)) levers.single.push_back(*alone);
        for (std::size_t j = 0; j < i; ++j) {
            if (singles[i].first == singles[j].first) continue;
            if (const auto pair = lever(singles[j].second + " " + singles[i].second))
                levers.pairs.push_back(*pair);
        }
    }
    // Where times are equal, or not known, what saves more comes first.
    const auto cheaper = [](const Lever& a, const Lever& b) {
        return std::tuple(a.seconds_lost, b.bytes_saved, std::string_view(a.options)) <
               std::tuple(b.seconds_lost, a.bytes_saved, std::string_view(b.options));
    };
    for (std::vector<Lever>* list : {&levers.single, &levers.pairs}) std::ranges::sort(*list, cheaper);
    if (run.verdict != Verdict::does_not_fit) return levers;
    for (const std::vector<Lever>* list : {&levers.single, &levers.pairs}) {
        const auto found = std::ranges::find_if(*list, &Lever::fits);
        if (levers.first_fit.empty() && found != list->end()) levers.first_fit = found->options;
    }
    return levers;
}

}  // namespace llmc
