// The list as a person reads it: --print-step, and the names in its errors.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

#include "llmc/parallel/phase.h"
#include "llmc/parallel/step.h"
#include "llmc/parallel/step_places.h"

namespace llmc {

std::string_view name_of(ActionKind kind) {
    switch (kind) {
        case ActionKind::load:
            return "load";
        case ActionKind::gather_parameters:
            return "gather_parameters";
        case ActionKind::release:
            return "release";
        case ActionKind::zero:
            return "zero";
        case ActionKind::forward:
            return "forward";
        case ActionKind::forward_rows:
            return "forward_rows";
        case ActionKind::recompute:
            return "recompute";
        case ActionKind::backward:
            return "backward";
        case ActionKind::backward_input:
            return "backward_input";
        case ActionKind::backward_weight:
            return "backward_weight";
        case ActionKind::receive_activation:
            return "receive_activation";
        case ActionKind::send_activation:
            return "send_activation";
        case ActionKind::receive_gradient:
            return "receive_gradient";
        case ActionKind::send_gradient:
            return "send_gradient";
        case ActionKind::logits:
            return "logits";
        case ActionKind::round:
            return "round";
        case ActionKind::accumulate:
            return "accumulate";
        case ActionKind::reduce_scatter:
            return "reduce_scatter";
        case ActionKind::all_reduce:
            return "all_reduce";
        case ActionKind::accumulate_shard:
            return "accumulate_shard";
        case ActionKind::sum_replicated:
            return "sum_replicated";
        case ActionKind::sum_tied:
            return "sum_tied";
        case ActionKind::gather_gradients:
            return "gather_gradients";
        case ActionKind::reduce_loss:
            return "reduce_loss";
        case ActionKind::square:
            return "square";
        case ActionKind::gather_squares:
            return "gather_squares";
        case ActionKind::norm:
            return "norm";
        case ActionKind::update:
            return "update";
    }
    return "?";
}

std::string to_string(const Part& part) {
    switch (part.kind) {
        case PartKind::embedding:
            return "embedding";
        case PartKind::block:
            return fmt::format("block {}", part.block);
        case PartKind::head:
            return "head";
    }
    return "?";
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
    switch (role) {
        case BufferRole::parameters:
            return "parameters";
        case BufferRole::parameter_shard:
            return "parameter shard";
        case BufferRole::gradients:
            return "gradients";
        case BufferRole::gradient_shard:
            return "gradient shard";
        case BufferRole::gradient_sums:
            return "sums";
        case BufferRole::optimizer:
            return "optimizer";
        case BufferRole::tokens:
            return "tokens";
        case BufferRole::chunk_input:
            return "input";
        case BufferRole::residual:
            return "residual";
        case BufferRole::saved:
            return "saved";
        case BufferRole::recomputed:
            return "recomputed";
        case BufferRole::output_gradients:
            return "doutputs";
        case BufferRole::residual_gradient:
            return "dresidual";
        case BufferRole::rows:
            return "rows";
        case BufferRole::logits:
            return "logits";
        case BufferRole::loss:
            return "loss";
        case BufferRole::squares:
            return "squares";
        case BufferRole::norm:
            return "norm";
    }
    return "?";
}

// "parameters h.2 (in h.0's place), tokens".
std::string to_string(std::span<const BufferUse> uses, std::span<const std::string> unit_names) {
    std::string text;
    for (std::size_t i = 0; i < uses.size(); ++i) {
        const BufferUse& use = uses[i];
        if (i > 0) text += ", ";
        text += name_of(use.role);
        if (use.role == BufferRole::recomputed) {
            text += " " + unit_names[static_cast<std::size_t>(use.unit)];
        } else if (belongs_to_unit(use.role)) {
            text += " " + unit_names[static_cast<std::size_t>(use.unit)];
            if (use.index != use.unit)
                text += fmt::format(" (in {}'s place)", unit_names[static_cast<std::size_t>(use.index)]);
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

std::string to_string(const Step& step, std::span<const std::string> unit_names) {
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
        const bool of_part =
            phase_of(action.kind) == Phase::forward || phase_of(action.kind) == Phase::backward;
        const std::string on = action.unit < 0 && of_part ? to_string(action.part)
                               : is_between_stages(action.kind)
                                   ? fmt::format("chunk {}", step.chunk_of(action).number)
                               : action.unit >= 0 ? unit_names[static_cast<std::size_t>(action.unit)]
                                                  : "";
        const std::string micro = action.micro_batch >= 0 ? std::to_string(action.micro_batch) : "";
        const std::string after = fmt::format("{}", fmt::join(action.after, ","));
        text += fmt::format("{:>5}  {:>5}  {:<14} {:<17} {:<10} {:>5}  {}{}{}\n", i, after,
                            name_of(action.stream), name_of(action.kind), on, micro,
                            to_string(action.reads, unit_names), action.reads.empty() ? "-> " : " -> ",
                            to_string(action.writes, unit_names));
    }
    return text;
}

}  // namespace llmc
