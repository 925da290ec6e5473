// The list as a person reads it: --print-step, and the names in its errors.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

#include "llmc/core/names.h"
#include "llmc/parallel/step.h"
#include "llmc/parallel/step_places.h"

namespace llmc {

std::string_view name_of(ActionKind kind) {
    return name_among(kind, "load", "gather_parameters", "release", "zero", "forward", "forward_rows",
                      "recompute", "backward", "backward_input", "backward_weight", "receive_activation",
                      "send_activation", "receive_gradient", "send_gradient", "logits", "round", "accumulate",
                      "reduce_scatter", "all_reduce", "accumulate_shard", "sum_replicated", "sum_tied",
                      "gather_gradients", "reduce_loss", "square", "gather_squares", "norm", "update");
}

bool belongs_to_unit(BufferRole role) {
    switch (role) {
        case BufferRole::parameters:
        case BufferRole::parameter_shard:
        case BufferRole::gradients:
        case BufferRole::gradient_shard:
        case BufferRole::gradient_sums:
        case BufferRole::optimizer:
            return true;
        default:
            return false;
    }
}

bool belongs_to_micro_batch(BufferRole role) {
    return lies_in_slot(role) || role == BufferRole::chunk_input || role == BufferRole::residual_gradient ||
           role == BufferRole::output_gradients || role == BufferRole::rows || role == BufferRole::logits;
}

bool lies_in_slot(BufferRole role) {
    return role == BufferRole::tokens || role == BufferRole::residual || role == BufferRole::saved;
}

namespace {

std::string_view name_of(BufferRole role) {
    return name_among(role, "parameters", "parameter shard", "gradients", "gradient shard", "sums",
                      "optimizer", "tokens", "input", "residual", "saved", "recomputed", "doutputs",
                      "dresidual", "rows", "logits", "loss", "squares", "norm");
}

// "parameters h.2 (in h.0's place), tokens".
std::string to_string(std::span<const BufferUse> uses, const Outline& outline) {
    const auto unit_name = [&](int unit) -> const std::string& { return outline.unit(unit).spec.name; };
    std::string text;
    for (std::size_t i = 0; i < uses.size(); ++i) {
        const BufferUse& use = uses[i];
        if (i > 0) text += ", ";
        text += name_of(use.role);
        if (use.role == BufferRole::recomputed) {
            text += " " + unit_name(outline.part(use.unit).own_unit);
        } else if (belongs_to_unit(use.role)) {
            text += " " + unit_name(use.unit);
            if (use.index != use.unit) text += fmt::format(" (in {}'s place)", unit_name(use.index));
        }
        if (use.role == BufferRole::residual || use.role == BufferRole::saved ||
            use.role == BufferRole::output_gradients ||
            ((use.role == BufferRole::chunk_input || use.role == BufferRole::residual_gradient) &&
             use.index > 0))
            text += fmt::format(" {}", use.index);
    }
    return text;
}

std::string counted(int n, std::string_view what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

}  // namespace

std::string to_string(const Step& step) {
    const Outline& outline = *step.part.outline;
    std::string sharding = step.sharding.description();
    if (!sharding.empty()) sharding.insert(0, ", ");
    std::string tensor;
    if (step.tensor.ranks > 1) {
        tensor = fmt::format(", {}{}", counted(step.tensor.ranks, "tensor rank"),
                             step.tensor.sequence_parallel ? " with their tokens divided" : "");
    }
    std::string recompute;
    if (step.part.recomputes_any(step.recompute)) {
        recompute = fmt::format(", recompute {}", name_of(step.recompute.kind));
        if (step.recompute.every > 1) recompute += fmt::format(" of 1 block in {}", step.recompute.every);
    }
    std::string text = fmt::format(
        "one step of this rank: {} actions, {}{}, {}{}{}{}\n\n", step.actions.size(),
        step.stages == 1 ? "" : fmt::format("stage {} of {}, ", step.stage, step.stages),
        step.micro_batches == 1 ? "1 micro-batch" : fmt::format("{} micro-batches", step.micro_batches),
        counted(step.sharding.ranks(), "data rank"), tensor, sharding, recompute);
    text += fmt::format("{:>5}  {:>5}  {:<14} {:<17} {:<10} {:>5}  {}\n", "#", "after", "stream", "action",
                        "on", "micro", "reads -> writes");
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        const std::string on = action.part >= 0 ? outline.part(action.part).name
                               : is_between_stages(action.kind)
                                   ? fmt::format("chunk {}", step.chunk_of(action).number)
                               : action.unit >= 0 ? outline.unit(action.unit).spec.name
                                                  : "";
        const std::string micro = action.micro_batch >= 0 ? std::to_string(action.micro_batch) : "";
        const std::string after = fmt::format("{}", fmt::join(action.after, ","));
        text += fmt::format("{:>5}  {:>5}  {:<14} {:<17} {:<10} {:>5}  {}{}{}\n", i, after,
                            name_of(action.stream), name_of(action.kind), on, micro,
                            to_string(action.reads, outline), action.reads.empty() ? "-> " : " -> ",
                            to_string(action.writes, outline));
    }
    return text;
}

}  // namespace llmc
