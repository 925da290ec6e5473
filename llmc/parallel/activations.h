// The buffers of the forward and backward pass: one set of saved activations for every micro-batch in flight,
// and what all micro-batches share.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/device/arenas.h"
#include "llmc/model/model.h"
#include "llmc/parallel/stage.h"
#include "llmc/parallel/step.h"

namespace llmc {

template <class Buffer>
struct TokenBuffers {
    Buffer inputs, targets;  // int32 (B,T)
};

// What a chunk of the model keeps of a micro-batch, beside its input, from its forward pass to the end of its backward
// pass: of as many parts as the stage's largest chunk has.
template <class Buffer>
struct SlotBuffers {
    std::vector<Buffer> residual;  // the stream behind each part that has an input
    std::vector<std::vector<Buffer>>
        kept;  // PartLists::kept of each; of the part before these first. What they recompute is
               // the same memory in all slots
};

template <class Buffer>
struct ActivationBuffers {
    std::vector<SlotBuffers<Buffer>> slots;
    std::vector<Buffer> chunk_inputs;
    std::vector<TokenBuffers<Buffer>>
        tokens;  // one more than are in use: for the micro-batch that comes ahead
    std::vector<Buffer> scratch;
    std::vector<Buffer> losses;                         // what the part with the losses keeps
    std::vector<Buffer> residual_gradients;             // index: as BufferRole has it
    std::vector<std::vector<Buffer>> output_gradients;  // PartLists::kept_gradients
    Buffer results;        // fp64 (2): the sum of the losses, the squared norm of the gradients
    Buffer norm_partials;  // fp32, one for every norm block of every unit
};

struct ActivationSpec {
    const ModelLists* lists = nullptr;  // of a micro-batch
    StagePart part{};
    BuffersInFlight in_flight{};
    std::int64_t norm_blocks = 0;
    Recompute recompute{};
};

ActivationBuffers<BufferId> lay_out_activations(MemoryLayout& layout, const ActivationSpec& spec);

// The buffers in memory.
ActivationBuffers<Tensor> bind(const ActivationBuffers<BufferId>& ids, const Arenas& arenas);

}  // namespace llmc
