#include "llmc/parallel/phase.h"

#include "llmc/core/error.h"

namespace llmc {

std::string_view name_of(Phase phase) {
    switch (phase) {
        case Phase::data:
            return "data";
        case Phase::forward:
            return "forward";
        case Phase::backward:
            return "backward";
        case Phase::communication:
            return "communication";
        case Phase::norm:
            return "norm";
        case Phase::update:
            return "update";
    }
    return "?";
}

Phase phase_of(ActionKind kind) {
    switch (kind) {
        case ActionKind::load:
            return Phase::data;
        case ActionKind::release:
        case ActionKind::forward:
        case ActionKind::forward_rows:
        case ActionKind::logits:
            return Phase::forward;
        case ActionKind::zero:
        case ActionKind::recompute:
        case ActionKind::backward:
        case ActionKind::backward_input:
        case ActionKind::backward_weight:
        case ActionKind::round:
        case ActionKind::accumulate:
        case ActionKind::accumulate_shard:
            return Phase::backward;
        case ActionKind::gather_parameters:
        case ActionKind::receive_activation:
        case ActionKind::send_activation:
        case ActionKind::receive_gradient:
        case ActionKind::send_gradient:
        case ActionKind::reduce_scatter:
        case ActionKind::sum_replicated:
        case ActionKind::sum_tied:
        case ActionKind::all_reduce:
        case ActionKind::gather_gradients:
        case ActionKind::reduce_loss:
        case ActionKind::gather_squares:
            return Phase::communication;
        case ActionKind::square:
        case ActionKind::norm:
            return Phase::norm;
        case ActionKind::update:
            return Phase::update;
    }
    programming_error("an unknown action");
}

}  // namespace llmc
