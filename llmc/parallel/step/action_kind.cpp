#include "llmc/parallel/step/action_kind.h"

#include <cstddef>

namespace llmc {

namespace {

struct Row {
    ActionKind kind;
    std::string_view name;
    Phase phase;
};
constexpr std::array rows = {
    Row{ActionKind::load, "load", Phase::data},
    Row{ActionKind::gather_parameters, "gather_parameters", Phase::communication},
    Row{ActionKind::release, "release", Phase::forward},
    Row{ActionKind::zero, "zero", Phase::backward},
    Row{ActionKind::forward, "forward", Phase::forward},
    Row{ActionKind::forward_rows, "forward_rows", Phase::forward},
    Row{ActionKind::recompute, "recompute", Phase::backward},
    Row{ActionKind::backward, "backward", Phase::backward},
    Row{ActionKind::backward_input, "backward_input", Phase::backward},
    Row{ActionKind::backward_weight, "backward_weight", Phase::backward},
    Row{ActionKind::receive_activation, "receive_activation", Phase::communication},
    Row{ActionKind::send_activation, "send_activation", Phase::communication},
    Row{ActionKind::receive_gradient, "receive_gradient", Phase::communication},
    Row{ActionKind::send_gradient, "send_gradient", Phase::communication},
    Row{ActionKind::logits, "logits", Phase::forward},
    Row{ActionKind::round, "round", Phase::backward},
    Row{ActionKind::accumulate, "accumulate", Phase::backward},
    Row{ActionKind::reduce_scatter, "reduce_scatter", Phase::communication},
    Row{ActionKind::all_reduce, "all_reduce", Phase::communication},
    Row{ActionKind::accumulate_shard, "accumulate_shard", Phase::backward},
    Row{ActionKind::sum_replicated, "sum_replicated", Phase::communication},
    Row{ActionKind::sum_tied, "sum_tied", Phase::communication},
    Row{ActionKind::gather_gradients, "gather_gradients", Phase::communication},
    Row{ActionKind::reduce_loss, "reduce_loss", Phase::communication},
    Row{ActionKind::reduce_amax, "reduce_amax", Phase::communication},
    Row{ActionKind::upload_gradients, "upload_gradients", Phase::communication},
    Row{ActionKind::download_gradients, "download_gradients", Phase::communication},
    Row{ActionKind::square, "square", Phase::norm},
    Row{ActionKind::gather_squares, "gather_squares", Phase::communication},
    Row{ActionKind::norm, "norm", Phase::norm},
    Row{ActionKind::momentum, "momentum", Phase::update},
    Row{ActionKind::upload_directions, "upload_directions", Phase::communication},
    Row{ActionKind::download_directions, "download_directions", Phase::communication},
    Row{ActionKind::gather_directions, "gather_directions", Phase::communication},
    Row{ActionKind::orthogonalise, "orthogonalise", Phase::update},
    Row{ActionKind::update, "update", Phase::update},
    Row{ActionKind::read_state, "read_state", Phase::disk},
    Row{ActionKind::write_state, "write_state", Phase::disk},
    Row{ActionKind::read_parameters, "read_parameters", Phase::disk},
    Row{ActionKind::write_parameters, "write_parameters", Phase::disk},
    Row{ActionKind::upload_parameters, "upload_parameters", Phase::communication},
    Row{ActionKind::download_parameters, "download_parameters", Phase::communication},
};
constexpr bool is_in_order() {
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (rows[i].kind != static_cast<ActionKind>(i)) return false;
    return true;
}
static_assert(is_in_order() && rows.back().kind == ActionKind::download_parameters,
              "a row for each kind, in their order");

const Row& row_of(ActionKind kind) { return rows.at(static_cast<std::size_t>(kind)); }

}  // namespace

std::string_view name_of(ActionKind kind) { return row_of(kind).name; }
Phase phase_of(ActionKind kind) { return row_of(kind).phase; }

}  // namespace llmc
