// Finds what is wrong with the state of a run, for the error that then ends it: the first tensor with a nan
// or an infinity, or a tensor whose copies on several ranks differ. The search for a nan runs at most once,
// at the end of a run, so it examines one tensor after the other on the host.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/device/device.h"
#include "llmc/parallel/zero/parameter_store.h"
#include "llmc/plan/run_plan.h"

namespace llmc {

// The first tensor of weights or of the optimizer's state that is not finite, as "the weight h.0.ln_1.bias". All ranks
// call it and get the same answer.
std::optional<std::string> non_finite_state(const ParameterStore& store, Communicator& ranks);

// Repeats the forward pass of one micro-batch. `list` is RunPlan::diagnosis, or its actions up to some part
// of the model.
struct ForwardPasses {
    int micro_batches;
    std::function<void(int micro_batch, const Step& list)> run;
};

// The first tensor of a step that is not finite, on any rank. The search goes through weights and optimizer state,
// then the activations of the forward pass ("the output of h.0.mlp.c_fc"), then the gradients of the backward
// pass. If all are finite, it is the gradient's norm. All ranks call it after the same step and get the same
// answer.
std::string first_non_finite(const RunPlan& plan, const Arenas& arenas, Device& device,
                             const ParameterStore& store, Communicator& ranks, const ForwardPasses& passes);

// Compares state that ranks hold copies of. A difference means faulty memory, a faulty link, or a bug.
//
// Finds the first tensor whose copies differ, by hashes of their bytes: "the parameters h.1.mlp.c_fc.weight
// of rank 2 differ from those of rank 0". Whole tensors are compared over all ranks that hold them, and
// shards over the ranks with the same shard (of the data-parallel and of the tensor-parallel group). The
// answer names the ranks that differ from the majority; of two ranks, the later one. All ranks of `world`
// call it and get the same answer.
std::optional<std::string> differing_replica(const ParameterStore& store, Communicator& world);

}  // namespace llmc
