#include "llmc/plan/pipeline_estimate.h"

#include <fmt/format.h>

#include "llmc/parallel/pipeline/pipeline_partition.h"
#include "llmc/parallel/step/build_step.h"

namespace llmc {

namespace {

// Floating-point operations per token.
PassTimes cost_of(const Outline& outline, const Chunk& chunk, const Recompute& recompute) {
    PassTimes cost;
    for (int number = chunk.first_part; number < chunk.end_part; ++number) {
        const Outline::OutlinedPart& part = outline.part(number);
        const double forward = forward_cost(outline.kind_of(part).part);
        // The forward pass of the loss runs only in the backward pass, together with its gradients.
        if (!part.makes_losses()) cost.forward += forward;
        cost.backward_input +=
            backward_cost(outline.kind_of(part).part) + (part.makes_losses() ? forward : 0);
        if (splits_backward(outline, number, recompute)) {
            const double weights = weight_cost(outline.kind_of(part).part);
            cost.backward_input -= weights;
            cost.backward_weight += weights;
        }
        if (!part.is_layer() || recompute.of(part.layer) != RecomputeKind::block) continue;
        cost.backward_input += forward;
        // The backward pass begins with the chunk's last part, whose recompute needs no gradient and can run
        // before it arrives.
        if (number + 1 == chunk.end_part) cost.backward_prepared = forward;
    }
    return cost;
}

}  // namespace

std::vector<PassTimes> estimated_times(const RunPlan& plan, std::optional<double> peak) {
    const Outline& outline = *plan.outline;
    const auto tokens = static_cast<double>(plan.micro_batch * plan.spec.model.sequence_length);
    // The ranks of a tensor-parallel group share the operations.
    const double unit = peak ? *peak * plan.spec.mesh.tensor / tokens
                             : forward_cost(outline.kind_of(outline.layers.front()).part);
    std::vector<PassTimes> times;
    for (int number = 0; number < plan.pipeline.chunks(); ++number) {
        PassTimes time = cost_of(outline, plan.chunk(number), plan.spec.recompute);
        for (double* cost :
             {&time.forward, &time.backward_input, &time.backward_weight, &time.backward_prepared})
            *cost /= unit;
        times.push_back(time);
    }
    return times;
}

bool splits_backward(const RunPlan& plan, int chunk) {
    return plan.pipeline.splits_backward() &&
           has_weight_half(*plan.outline, plan.chunk(chunk), plan.spec.recompute);
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
    return without_empty_halves(timeline, [&](int chunk) { return splits_backward(plan, chunk); });
}

Timeline estimated_timeline(const RunPlan& plan, std::optional<double> peak) {
    Timeline timeline = as_performed(
        plan, simulate(plan.pipeline, pipeline_passes(plan.pipeline), estimated_times(plan, peak)));
    if (!peak) timeline.unit = "block forwards";
    return timeline;
}

}  // namespace llmc
