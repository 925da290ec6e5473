#include "llmc/plan/pipeline_estimate.h"

#include <fmt/format.h>

#include "llmc/parallel/build_step.h"
#include "llmc/parallel/pipeline_partition.h"

namespace llmc {

namespace {

// Floating-point operations a token.
PassTimes cost_of(const Chunk& chunk, const GPTConfig& config, const Recompute& recompute) {
    const auto C = static_cast<double>(config.channels);
    const double weights = 24 * C * C;
    PassTimes cost;
    for (int block = chunk.first_layer; block < chunk.end_layer; ++block) {
        cost.forward += block_cost(config);
        cost.backward_input += 2 * block_cost(config);
        if (!recompute.recomputes(block)) {
            cost.backward_input -= weights;
            cost.backward_weight += weights;
        }
        if (recompute.of(block) != RecomputeKind::block) continue;
        cost.backward_input += block_cost(config);
        // The backward pass begins with the chunk's last block, or with the head.
        if (block + 1 == chunk.end_layer && !chunk.makes_losses) cost.backward_prepared = block_cost(config);
    }
    if (chunk.takes_tokens) {
        cost.forward += embedding_cost(config);
        cost.backward_input += 2 * embedding_cost(config);
    }
    if (chunk.makes_losses) cost.backward_input += 3 * head_cost(config);
    return cost;
}

}  // namespace

std::vector<PassTimes> estimated_times(const RunPlan& plan, std::optional<double> peak) {
    const GPTConfig& config = plan.spec.config;
    const auto tokens = static_cast<double>(plan.micro_batch * config.sequence_length);
    // The ranks of a stage share its operations.
    const double unit = peak ? *peak * plan.spec.mesh.tensor / tokens : block_cost(config);
    std::vector<PassTimes> times;
    for (int number = 0; number < plan.pipeline.chunks(); ++number) {
        PassTimes time = cost_of(plan.chunk(number), config, plan.spec.recompute);
        for (double* cost :
             {&time.forward, &time.backward_input, &time.backward_weight, &time.backward_prepared})
            *cost /= unit;
        times.push_back(time);
    }
    return times;
}

bool splits_backward(const RunPlan& plan, int chunk) {
    return plan.pipeline.splits_backward() &&
           has_weight_part(*plan.outline, plan.chunk(chunk), plan.spec.recompute);
}

std::string schedule_name(const RunPlan& plan) {
    bool splits = false;
    for (int chunk = 0; chunk < plan.pipeline.chunks(); ++chunk) splits |= splits_backward(plan, chunk);
    const bool is_whole = plan.pipeline.splits_backward() && !splits;
    return fmt::format("{}{}", name_of(plan.pipeline.schedule),
                       is_whole ? fmt::format(" (all blocks recompute: in the order of {})",
                                              name_of(PipelineSchedule::one_f_one_b))
                                : "");
}

Timeline as_performed(const RunPlan& plan, const Timeline& timeline) {
    return without_empty_parts(timeline, [&](int chunk) { return splits_backward(plan, chunk); });
}

Timeline estimated_timeline(const RunPlan& plan, std::optional<double> peak) {
    Timeline timeline = as_performed(
        plan, simulate(plan.pipeline, pipeline_passes(plan.pipeline), estimated_times(plan, peak)));
    if (!peak) timeline.unit = "block forwards";
    return timeline;
}

}  // namespace llmc
