// The kinds of actions (step.h). A new one gets a row in action_kind.cpp.
#pragma once

#include <array>
#include <string_view>

#include "llmc/core/text.h"

namespace llmc {

enum class ActionKind {
    // Copies a micro-batch's tokens to the device.
    load,
    // All-gathers a unit's parameters within the sharding group.
    gather_parameters,
    // Marks a unit's whole parameters as no longer needed. Another unit may take their memory.
    release,
    // Sets to 0 the buffer to which the backward pass adds a unit's gradients.
    zero,
    // Forward pass of a part. The head's forward pass computes the losses only.
    forward,
    // Forward pass of a part for a few rows (model/derive_rows.cpp).
    forward_rows,
    // Recomputes the activations that a part did not keep.
    recompute,
    // Backward pass of a part. The head's includes its forward pass: it keeps no logits.
    backward,
    // Computes the gradient of a part's input. Keeps what backward_weight needs.
    backward_input,
    // Computes the gradients of a part's parameters from what backward_input kept.
    backward_weight,
    // Receives a chunk's input from the stage before.
    receive_activation,
    // Sends a chunk's output to the stage after.
    send_activation,
    // Receives the gradient of a chunk's output from the stage after.
    receive_gradient,
    // Sends the gradient of a chunk's input to the stage before.
    send_gradient,
    // Forward pass of the head for the last of a few rows.
    logits,
    // Rounds a unit's gradient sums into its gradients.
    round,
    // Adds a unit's gradient sums to its gradients, and rounds the result.
    accumulate,
    // Sums a unit's gradients over the sharding group. Each rank receives its shard.
    reduce_scatter,
    // Sums a unit's gradient shard over the groups of hybrid sharding.
    all_reduce,
    // Adds the gradient shard just reduced to the unit's shard of the sum.
    accumulate_shard,
    // Sums gradients of replicated tensors over the tensor-parallel group.
    sum_replicated,
    // Sums a unit's gradient shard over the stages that have the unit.
    sum_tied,
    // All-gathers a unit's summed gradient shards.
    gather_gradients,
    // Sums the loss over the ranks. All stages receive the sum.
    reduce_loss,
    // Takes the greatest magnitudes of the operands of products in 8 bits over all ranks, as bits in int32.
    reduce_amax,
    // Copies what the host has of a unit's gradients to the device, to go on with them.
    upload_gradients,
    // Copies them to the host.
    download_gradients,
    // Computes sums of squares of this rank's gradient shards: a unit's, or those of all other units.
    square,
    // Gathers these sums from the sharding group and from all stages.
    gather_squares,
    // Adds these sums up: the squared norm of all gradients.
    norm,
    // Muon: updates the momentum of this rank's share of a unit's matrices, and makes of it their directions. The host
    // does it if the state is there.
    momentum,
    // Copies directions to the device, and back.
    upload_directions,
    download_directions,
    // All-gathers directions within the sharding group, and then over the tensor-parallel group.
    gather_directions,
    // Makes the matrices that this rank has a share of orthogonal (orthogonal.h), each as a whole.
    orthogonalise,
    // Updates this rank's share of a unit's optimizer state and weights, or a piece of it, by the gradients of the step
    // before. The host does it if the state is there or on a disk.
    update,
    // Reads a piece of a unit's optimizer state from the disk into a buffer.
    read_state,
    // Writes it back.
    write_state,
    // Reads a unit's parameters from the disk: whole, or at stage 3 this rank's shard.
    read_parameters,
    // Writes them there after their update.
    write_parameters,
    // Copies what the host has of a unit's parameters to the device.
    upload_parameters,
    // Copies parameters that the device has updated or gathered to the host.
    download_parameters,
};

// The phases of a step, whose milliseconds are measured. `communication` is the time for which computing
// stood still; communication that overlaps with computing costs nothing here. `disk` is the same of a disk. Copies
// between a device and the host count as communication.
enum class Phase { data, forward, backward, communication, norm, update, disk };
inline constexpr std::array all_phases = {Phase::data, Phase::forward, Phase::backward, Phase::communication,
                                          Phase::norm, Phase::update,  Phase::disk};
inline std::string_view name_of(Phase phase) {
    return name_among(phase, "data", "forward", "backward", "communication", "norm", "update", "disk");
}

std::string_view name_of(ActionKind kind);
// The phase to which the time of an action counts.
Phase phase_of(ActionKind kind);

}  // namespace llmc
