// Makes the list of actions of a rank. The list is a pure function of the rank's part of the model, the
// pipeline schedule, the number of micro-batches, the sharding, the dtype of gradients, and the
// recomputation.
#pragma once

#include <set>
#include <vector>

#include "llmc/model/part_lists.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/parallel/pipeline/pipeline_schedule.h"
#include "llmc/parallel/pipeline/stage.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

struct StepSpec {
    StagePart part{};
    int stage = 0;
    PipelineSpec pipeline{};  // the schedule of all stages, and the number of micro-batches
    Sharding sharding{};
    TensorSplit tensor{};
    // Whether gradients are kept in bf16. The backward pass of a micro-batch then makes fp32 sums, which are
    // added to the bf16 gradients.
    bool rounds_gradients = false;
    bool reduces_amax = false;  // whether products in 8 bits have delayed scaling
    Recompute recompute{};
    // With optimizer state on disk: the number of pieces of each unit (state_pieces.h). Empty: it is in memory.
    std::vector<int> state_pieces{};
    // The units with matrices that the optimizer updates as a whole (Optimizer::others).
    std::set<int> units_with_directions{};
    // For an evaluation list: the slots of the training list. For each slot, the first part with an input of
    // a chunk that uses the slot.
    std::vector<int> slots{};
};

// Whether the second half of a chunk's split backward pass has anything to do. If not, the first half is the
// whole backward pass.
bool has_weight_half(const Outline& outline, const Chunk& chunk, const Recompute& recompute);

// Builds a training step: forward and backward passes of every micro-batch in the order of the schedule, then
// the norm. A unit's gradients are reduced after the last action that writes them. Sharded parameters are
// gathered ahead of the forward and the backward pass. The list also finishes the step before: each unit is
// updated ahead of the first action that needs it (insert_updates), and its parameters are gathered then if
// they are whole and the optimizer state is sharded.
Step build_training_step(const StepSpec& spec);

// Builds the updates alone, which finish a step that no other follows.
Step build_update_step(const StepSpec& spec);

// Builds a validation step: the micro-batches up to the losses, summed over ranks.
Step build_evaluation_step(const StepSpec& spec);

// Builds a generation step: the forward pass of a few new tokens (rows) of one sequence, up to the logits of
// the last one. The keys and values of earlier tokens are in the cache.
Step build_generation_step(const StepSpec& spec);

// Builds the gathers that make parameters whole after each rank was given its shard. The list is empty if
// each rank has all parameters, or needs only its shard.
Step build_parameter_gathers(const StepSpec& spec);

}  // namespace llmc
