// Lays out the buffers of the forward and backward pass: one set of saved activations for every micro-batch
// in flight, and the buffers that all micro-batches share.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/device/device.h"
#include "llmc/model/model.h"
#include "llmc/parallel/pipeline/stage.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

template <class Buffer>
struct TokenBuffers {
    Buffer inputs, targets;  // int32 (B,T)
};

// The activations that a chunk keeps for a micro-batch, besides its input, from its forward pass to the end
// of its backward pass. There is room for as many parts as the stage's largest chunk has.
template <class Buffer>
struct SlotBuffers {
    std::vector<Buffer> residual;  // the residual stream after each part that has an input
    // PartLists::kept of each part: first that of the part that takes tokens, then those of the parts with an
    // input. All slots share the memory of recomputed activations.
    std::vector<std::vector<Buffer>> kept;
};

template <class Buffer>
struct ActivationBuffers {
    std::vector<SlotBuffers<Buffer>> slots;
    std::vector<Buffer> chunk_inputs;
    // One more than BuffersInFlight::tokens, for the next micro-batch, which is copied ahead.
    std::vector<TokenBuffers<Buffer>> tokens;
    std::vector<Buffer> scratch;
    std::vector<Buffer> angles;                         // Scratch::angles
    std::vector<Buffer> losses;                         // kept by the part that makes losses
    std::vector<Buffer> residual_gradients;             // index: buffer * number of widths + width
    std::vector<std::vector<Buffer>> output_gradients;  // PartLists::kept_gradients
    Buffer results;        // fp64 (2): the sum of the losses, the squared norm of the gradients
    Buffer norm_partials;  // fp32, one for every norm block of every unit
    // fp32 (2, operands of products in 8 bits of the whole model): the greatest magnitudes by which they are scaled,
    // and those that this step has seen. Without elements unless they have delayed scaling.
    Buffer amax;
};

struct ActivationSpec {
    const ModelLists* lists = nullptr;  // for one micro-batch
    StagePart part{};
    BuffersInFlight in_flight{};
    std::int64_t norm_blocks = 0;
    Recompute recompute{};
};

ActivationBuffers<BufferId> lay_out_activations(MemoryLayout& layout, const ActivationSpec& spec);

// Returns the buffers as tensors in the arenas' memory.
ActivationBuffers<Tensor> bind(const ActivationBuffers<BufferId>& ids, const Arenas& arenas);

}  // namespace llmc
