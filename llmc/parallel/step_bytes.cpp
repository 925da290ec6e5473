// What a rank sends in a run of a list, as a sum over its actions (step.h).
#include "llmc/parallel/step.h"

namespace llmc {

namespace {

// What a part's action runs.
const List& list_of(const PartLists& lists, ActionKind kind, RecomputeKind recompute) {
    switch (kind) {
        case ActionKind::forward:
            return lists.forward;
        case ActionKind::recompute:
            return lists.recompute_of(recompute);
        case ActionKind::backward:
            return lists.backward;
        case ActionKind::backward_input:
            return lists.backward_input;
        default:
            return lists.backward_weight;
    }
}

bool computes(ActionKind kind) {
    return kind == ActionKind::forward || kind == ActionKind::recompute || kind == ActionKind::backward ||
           kind == ActionKind::backward_input || kind == ActionKind::backward_weight;
}

}  // namespace

BytesSent bytes_sent(const Step& step, std::span<const UnitBytes> units, const ModelLists& lists) {
    const auto shards = static_cast<std::uint64_t>(step.sharding.shards);
    const auto tensor = static_cast<std::uint64_t>(step.tensor.ranks);
    const Outline& outline = *step.part.outline;
    const PartSizes& sizes = lists.kinds.front().sizes;
    const std::int64_t T = outline.kinds.front().part.tokens;
    const auto stream = [&](int width) {
        return static_cast<std::uint64_t>(sizes.batch * sizes.split.tokens(T) *
                                          outline.widths[static_cast<std::size_t>(width)]) *
               size_of(sizes.dtype);
    };
    BytesSent sent;
    for (const Action& action : step.actions) {
        if (action.kind == ActionKind::send_activation)
            sent.stages += stream(outline.part(step.chunk_of(action).end_part - 1).output_width);
        if (action.kind == ActionKind::send_gradient)
            sent.stages += stream(outline.part(step.chunk_of(action).first_part).input_width);
        if (computes(action.kind))
            sent.tensor +=
                bytes_sent(list_of(lists.of(outline.part(action.part)), action.kind, step.recompute.kind));
        if (action.unit < 0) continue;
        const UnitBytes& unit = units[static_cast<std::size_t>(action.unit)];
        switch (action.kind) {
            case ActionKind::reduce_scatter:
            case ActionKind::gather_gradients:
                sent.inside += bytes_inside(unit.gradients, step.sharding);
                break;
            case ActionKind::gather_parameters:
                sent.inside += bytes_inside(unit.parameters, step.sharding);
                break;
            case ActionKind::all_reduce:
                sent.across += bytes_across(unit.gradients, step.sharding);
                break;
            case ActionKind::sum_replicated:
                sent.tensor += all_reduce_bytes(unit.replicated_gradients, unit.gradient_size, tensor);
                break;
            case ActionKind::sum_tied:
                sent.tied += all_reduce_bytes(unit.gradients / shards, unit.gradient_size,
                                              static_cast<std::uint64_t>(step.part.unit(action.unit).stages));
                break;
            default:
                break;
        }
    }
    return sent;
}

}  // namespace llmc
