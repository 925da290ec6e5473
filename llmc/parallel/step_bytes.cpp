// What a rank sends in a run of a list, as a sum over its actions (step.h).
#include "llmc/parallel/step.h"

namespace llmc {

namespace {

// Of a sum over ranks, as a reduce-scatter and an all-gather; what does not divide goes whole to every rank.
std::uint64_t all_reduce_bytes(std::uint64_t bytes, std::uint64_t element, std::uint64_t ranks) {
    const std::uint64_t elements = bytes / element, rest = elements % ranks;
    return (ranks - 1) * (2 * (elements - rest) / ranks + rest) * element;
}

// What tensor-parallel ranks say around an action's products, each as much as gathering the residual stream takes, or
// reducing it in parts; the sum of it takes twice as much.
int exchanges(const Step& step, const Action& action) {
    const bool divides_tokens = step.tensor.sequence_parallel;
    const bool recomputes_products = step.recompute.kind == RecomputeKind::block;
    switch (action.part.kind) {
        case PartKind::embedding:
            // The sum of the ranks' rows; its gradient of all tokens.
            if (action.kind == ActionKind::forward) return divides_tokens ? 1 : 2;
            return divides_tokens ? 1 : 0;
        case PartKind::block:
            switch (action.kind) {
                case ActionKind::recompute:
                    if (!recomputes_products) return 0;
                    return divides_tokens ? 3 : 2;  // but for the last sum
                case ActionKind::backward:
                    return divides_tokens ? 6 : 4;  // the layernorms' outputs once more
                case ActionKind::backward_weight:
                    return divides_tokens ? 4 : 0;
                default:
                    return 4;
            }
        case PartKind::head:
            // Its input; the gradient of that.
            if (action.kind == ActionKind::forward) return divides_tokens ? 1 : 0;
            return 2;
    }
    return 0;
}

bool computes(ActionKind kind) {
    return kind == ActionKind::forward || kind == ActionKind::recompute || kind == ActionKind::backward ||
           kind == ActionKind::backward_input || kind == ActionKind::backward_weight;
}

}  // namespace

BytesSent bytes_sent(const Step& step, std::span<const UnitBytes> units, const ActivationBytes& activations) {
    const auto shards = static_cast<std::uint64_t>(step.sharding.shards);
    const auto replicas = static_cast<std::uint64_t>(step.sharding.replicas);
    const auto tensor = static_cast<std::uint64_t>(step.tensor.ranks);
    const std::uint64_t own_stream =
        step.tensor.sequence_parallel ? activations.stream / tensor : activations.stream;
    BytesSent sent;
    for (const Action& action : step.actions) {
        if (action.kind == ActionKind::send_activation || action.kind == ActionKind::send_gradient)
            sent.stages += own_stream;
        if (computes(action.kind)) {
            const auto times = static_cast<std::uint64_t>(exchanges(step, action));
            sent.tensor += times * (activations.stream / tensor) * (tensor - 1);
            if (action.part.kind == PartKind::head) sent.tensor += activations.statistics * (tensor - 1);
        }
        if (action.unit < 0) continue;
        const UnitBytes& unit = units[static_cast<std::size_t>(action.unit)];
        switch (action.kind) {
            case ActionKind::reduce_scatter:
            case ActionKind::gather_gradients:
                sent.inside += unit.gradients / shards * (shards - 1);
                break;
            case ActionKind::gather_parameters:
                sent.inside += unit.parameters / shards * (shards - 1);
                break;
            case ActionKind::all_reduce:
                sent.across += 2 * (unit.gradients / shards / replicas) * (replicas - 1);
                break;
            case ActionKind::sum_replicated:
                sent.tensor += all_reduce_bytes(unit.replicated_gradients, unit.gradient_size, tensor);
                break;
            case ActionKind::sum_tied:
                sent.tied += unit.gradients / shards;
                break;
            default:
                break;
        }
    }
    return sent;
}

}  // namespace llmc
