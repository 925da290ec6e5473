// The buffers of the forward and backward pass: one set of saved activations for every micro-batch in flight,
// and what all micro-batches share.
#pragma once

#include <cstdint>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/device/arenas.h"
#include "llmc/model/block.h"
#include "llmc/model/config.h"
#include "llmc/model/head.h"

namespace llmc {

template <class Buffer>
struct TokenBuffers {
    Buffer inputs, targets;  // int32 (B,T)
};

// What a micro-batch owns, beside its tokens, from its load to the end of its backward pass.
template <class Buffer>
struct MicroBatchBuffers {
    std::vector<Buffer> residual;                  // L+1 times X (B,T,C)
    std::vector<BlockActivations<Buffer>> blocks;  // L; what they recompute is the same memory in all slots
};

template <class Buffer>
struct ActivationBuffers {
    std::vector<MicroBatchBuffers<Buffer>> slots;
    std::vector<TokenBuffers<Buffer>> tokens;  // one more than slots: for the micro-batch that comes ahead
    BlockScratch<Buffer> scratch;
    HeadActivations<Buffer> head;
    Buffer residual_gradient;  // X (B,T,C)
    Buffer results;            // fp64 (2): the sum of the losses, the squared norm of the gradients
    Buffer norm_partials;      // fp32, one for every norm block of every unit
};

struct ActivationSpec {
    GPTConfig config;
    DType dtype = DType::fp32;
    std::int64_t batch = 1;      // sequences of a micro-batch
    int slots = 1;               // micro-batches in flight
    std::int64_t head_rows = 1;  // of logits at a time
    std::int64_t norm_blocks = 0;
    Recompute recompute{};
};

ActivationBuffers<BufferId> lay_out_activations(MemoryLayout& layout, const ActivationSpec& spec);

// The buffers in memory.
ActivationBuffers<Tensor> bind(const ActivationBuffers<BufferId>& ids, const Arenas& arenas);

}  // namespace llmc
