#include "llmc/plan/what_fits.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "llmc/plan/memory_limit.h"
#include "llmc/plan/micro_batches.h"

namespace llmc {

namespace {

// With a step of a few micro-batches: more than any schedule has in flight at once, and so with hardly less memory than that of
// thousands, whose plan takes seconds.
bool short_step_fits(RunSpec spec, const MakePlan& make_plan, std::int64_t micro_batch) {
    const std::int64_t few = std::int64_t{4} * spec.mesh.pipeline * spec.virtual_stages;
    const std::int64_t sequences =
        std::min(spec.rank_sequences(), few * micro_batch) * spec.mesh.data_ranks();
    spec.global_batch_tokens = sequences * spec.model.sequence_length;
    return fits(spec.machine, make_plan(spec, micro_batch).largest_memory);
}

std::optional<std::int64_t> smaller_micro_batch(const RunSpec& spec, std::int64_t micro_batch) {
    if (micro_batch == 1) return std::nullopt;
    const std::int64_t smaller = best_micro_batch(spec, micro_batch - 1);
    if (spec.rank_sequences() / smaller > most_micro_batches(spec)) return std::nullopt;
    return smaller;
}

// The largest micro-batch, of at most so many sequences, with which a run may fit the memory; the smallest if none does.
std::int64_t micro_batch_to_try(const RunSpec& spec, const MakePlan& make_plan, std::int64_t micro_batch) {
    while (!short_step_fits(spec, make_plan, micro_batch)) {
        const auto smaller = smaller_micro_batch(spec, micro_batch);
        if (!smaller) break;
        micro_batch = *smaller;
    }
    return micro_batch;
}

}  // namespace

RunPlan plan_that_fits(const RunSpec& spec, const MakePlan& make_plan, std::int64_t micro_batch) {
    micro_batch = micro_batch_to_try(spec, make_plan, micro_batch);
    RunPlan plan = make_plan(spec, micro_batch);
    while (!fits(spec.machine, plan.largest_memory)) {
        const auto smaller = smaller_micro_batch(spec, micro_batch);
        if (!smaller) break;
        micro_batch = *smaller;
        plan = make_plan(spec, micro_batch);
    }
    return plan;
}

namespace {

// Whether some micro-batch of at most so many sequences makes it fit.
bool would_fit(const RunSpec& spec, const MakePlan& make_plan, std::int64_t micro_batch) {
    const std::int64_t smaller = micro_batch_to_try(spec, make_plan, micro_batch);
    return short_step_fits(spec, make_plan, smaller) &&
           fits(spec.machine, plan_that_fits(spec, make_plan, smaller).largest_memory);
}

// The first stage of ZeRO at which the run would fit, beyond the one that was asked for.
std::optional<int> stage_that_fits(RunSpec spec, const MakePlan& make_plan, std::int64_t micro_batch) {
    while (const auto next = spec.mesh.sharding.next_stage(spec.usual_reduction)) {
        spec.mesh.sharding = *next;
        if (would_fit(spec, make_plan, micro_batch)) return next->stage;
    }
    return std::nullopt;
}

// With twice as many GPUs or more, where the batch can be shared: "4 GPUs and --zero-stage 3"; empty where none would do.
std::string gpus_that_fit(const RunSpec& spec, const MakePlan& make_plan, std::int64_t micro_batch) {
    constexpr int most_times = 16;
    if (!spec.machine.more_processes_bring_more || !spec.trains) return "";
    for (int times = 2; times <= most_times; times *= 2) {
        RunSpec wider = spec;
        wider.mesh.sharding.shards *= times;
        if (wider.global_sequences() % wider.mesh.data_ranks() != 0) break;
        // From the stage that was asked for, with as much more in shards as it takes.
        const std::int64_t first = best_micro_batch(wider, micro_batch);
        std::optional<int> stage;
        if (wider.mesh.sharding.stage > 0 && would_fit(wider, make_plan, first))
            stage = wider.mesh.sharding.stage;
        if (!stage) stage = stage_that_fits(wider, make_plan, first);
        if (stage) return fmt::format("{} GPUs and --zero-stage {}", wider.mesh.world(), *stage);
    }
    return "";
}

}  // namespace

std::string what_would_fit(const RunSpec& spec, const MakePlan& make_plan, std::int64_t micro_batch) {
    constexpr Recompute all{.kind = RecomputeKind::block};
    RunSpec recomputing = spec;
    recomputing.recompute = all;
    const bool recomputes_all = spec.recompute == all;
    const std::string recompute =
        fmt::format("--recompute block{}", spec.recompute.every > 1 ? " --recompute-every 1" : "");
    const auto would_do = [&](const RunSpec& other) { return would_fit(other, make_plan, micro_batch); };
    // Without it, and with it where that is not asked for already.
    const auto with_either = [&](const auto& options_for) {
        std::string options = options_for(spec);
        if (!options.empty() || recomputes_all) return options;
        options = options_for(recomputing);
        return options.empty() ? options : fmt::format("{} with {}", recompute, options);
    };
    if (!recomputes_all && would_do(recomputing)) return recompute;
    std::string options = with_either([&](const RunSpec& run) {
        const auto stage = stage_that_fits(run, make_plan, micro_batch);
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
    return with_either([&](const RunSpec& run) { return gpus_that_fit(run, make_plan, micro_batch); });
}

}  // namespace llmc
