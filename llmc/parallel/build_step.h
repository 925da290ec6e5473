// Makes the list of actions of a rank: a pure function of its part of the model, the pipeline's schedule, how the data
// ranks shard, the accumulation, whether gradients are kept rounded and which activations are not kept.
#pragma once

#include <vector>

#include "llmc/model/recompute.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/parallel/pipeline_schedule.h"
#include "llmc/parallel/stage.h"
#include "llmc/parallel/step.h"

namespace llmc {

struct StepSpec {
    StagePart part{};
    int stage = 0;
    PipelineSpec pipeline{};  // of all stages, and the micro-batches
    Sharding sharding{};
    TensorSplit tensor{};
    // Gradients are kept in bf16: the backward pass of a micro-batch makes sums in fp32, which are then added to them.
    bool rounds_gradients = false;
    Recompute recompute{};
    // What each slot was laid out for by another list, that of training: the first part with an input of a chunk.
    std::vector<int> slots{};
};

// Whether something of a chunk is left for the second part of its backward pass, where the schedule splits that. Otherwise the
// first part is all of it.
bool has_weight_part(const Outline& outline, const Chunk& chunk, const Recompute& recompute);

// Forward and backward of every micro-batch, in the order of the schedule; gradients reduced behind the last action
// that writes them, then the norm and the update. Where parameters are kept in shards, they are gathered ahead of the
// forward and the backward pass; where only what updates them is, behind the update.
Step build_training_step(const StepSpec& spec);

// The micro-batches up to the losses, summed over ranks, for validation.
Step build_evaluation_step(const StepSpec& spec);

// A few rows of one sequence up to the logits of the last, for generation: the rows follow those of earlier runs.
Step build_generation_step(const StepSpec& spec);

// What makes parameters whole after each rank was given its shard; empty where it has all, or needs no more.
Step build_publication(const StepSpec& spec);

}  // namespace llmc
