// Which tensor was the first to hold nan or infinity, for the line with which a run then ends. All on the host and
// one tensor after the other: it happens once, at the end of a run.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/device/arenas.h"
#include "llmc/device/device.h"
#include "llmc/parallel/parameter_store.h"
#include "llmc/plan/run_plan.h"

namespace llmc {

// The first weight or moment that is not finite, as "the weight h.0.ln_1.bias". All ranks call it and receive the same
// answer.
std::optional<std::string> non_finite_state(Device& device, const ParameterStore& store, Communicator& ranks);

// Runs the forward pass of one of so many micro-batches again, by a list: RunPlan::diagnosis, or a part of it.
struct ForwardPasses {
    int micro_batches;
    std::function<void(int micro_batch, const Step& list)> run;
};

// What a step computed that is not finite: the first such weight, else the first such activation of the forward pass
// (of any rank and micro-batch, "the output of h.0.mlp.c_fc"), else the first such gradient of the backward pass, else
// the norm. All ranks call it after the same step and receive the same answer.
std::string first_non_finite(const RunPlan& plan, const Arenas& arenas, Device& device,
                             const ParameterStore& store, Communicator& ranks, const ForwardPasses& passes);

}  // namespace llmc
