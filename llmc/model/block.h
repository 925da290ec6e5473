// One transformer block: its tensors by name, what it keeps for its backward pass or makes again, and the pass in both
// directions.
//
//   h = x + attention(layernorm(x)) W_proj + b_proj
//   y = h + GELU(layernorm(h) W_fc + b_fc) W_mlp + b_mlp
#pragma once

#include <optional>
#include <string>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/arenas.h"
#include "llmc/device/ops.h"
#include "llmc/model/config.h"
#include "llmc/model/recompute.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/model/units.h"

namespace llmc {

// The tensors of a block's unit: parameters, or gradients of the same layout. Of R ranks that share the block
// (tensor_parallel.h), each has 3C/R rows of qkv and 4C/R of fc, and so many columns of the products that follow.
struct BlockTensors {
    Tensor ln_1_weight, ln_1_bias;          // (C)
    Tensor qkv_weight, qkv_bias;            // (3C,C), (3C)
    Tensor proj_weight, proj_bias;          // (C,C), (C)
    Tensor ln_2_weight, ln_2_bias;          // (C)
    Tensor fc_weight, fc_bias;              // (4C,C), (4C)
    Tensor mlp_proj_weight, mlp_proj_bias;  // (C,4C), (C)

    BlockTensors() = default;  // none: gradients that are not made
    BlockTensors(const UnitLayout& layout, const Tensor& flat);
};

// What the forward pass of a block leaves for its backward pass. What a block does not keep (recompute.h) is memory that
// it shares with the others that do not.
template <class Buffer>
struct BlockActivations {
    Buffer ln_1, ln_1_mean, ln_1_rstd;  // (B,T,C), fp32 (B,T) twice
    Buffer qkv;                         // (B,T,3,NH,HS)
    Buffer attention, lse;              // (B,T,NH,HS), fp32 (B,NH,T)
    Buffer residual;                    // (B,T,C) = h
    Buffer ln_2, ln_2_mean, ln_2_rstd;  // (B,T,C), fp32 (B,T) twice
    Buffer pre_gelu, gelu;              // (B,T,4C)

    // Calls f on every buffer.
    template <class F>
    auto transform(F&& f) const {
        using To = decltype(f(ln_1));
        return BlockActivations<To>{f(ln_1),      f(ln_1_mean), f(ln_1_rstd), f(qkv),
                                    f(attention), f(lse),       f(residual),  f(ln_2),
                                    f(ln_2_mean), f(ln_2_rstd), f(pre_gelu),  f(gelu)};
    }
};

// The gradients of the outputs of a block's layers, from which those of its parameters are made: kept where that comes later
// than the gradient of its input (zero-bubble schedules).
template <class Buffer>
struct BlockOutputGradients {
    Buffer ln_1;      // (B,T,C)
    Buffer qkv;       // (B,T,3,NH,HS)
    Buffer proj;      // (B,T,C)
    Buffer ln_2;      // (B,T,C)
    Buffer fc;        // (B,T,4C)
    Buffer mlp_proj;  // (B,T,C)

    template <class F>
    auto transform(F&& f) const {
        using To = decltype(f(ln_1));
        return BlockOutputGradients<To>{f(ln_1), f(qkv), f(proj), f(ln_2), f(fc), f(mlp_proj)};
    }
};

// Temporary storage shared by all blocks.
template <class Buffer>
struct BlockScratch {
    Buffer channels;                 // (B,T,C)
    Buffer qkv;                      // (B,T,3,NH,HS)
    Buffer wide;                     // (B,T,4C)
    std::optional<Buffer> gathered;  // (B,T,C), with sequence parallelism

    template <class F>
    auto transform(F&& f) const {
        using To = decltype(f(channels));
        BlockScratch<To> to{f(channels), f(qkv), f(wide), {}};
        if (gathered) to.gathered = f(*gathered);
        return to;
    }
};

// Shapes in comments are those of a rank that has the whole block.
struct BlockSizes {
    GPTConfig config;
    TensorSplit split{};
    std::int64_t batch = 1;
    DType dtype = DType::fp32;
};
// What blocks that recompute share: of all tensors that they do not keep.
BlockActivations<BufferId> lay_out_recomputed(MemoryLayout& layout, const BlockSizes& sizes,
                                              RecomputeKind kind);
// `recomputed` is what such blocks share.
BlockActivations<BufferId> lay_out_block_activations(MemoryLayout& layout, const std::string& name,
                                                     const BlockSizes& sizes, RecomputeKind kind,
                                                     const BlockActivations<BufferId>& recomputed);
BlockOutputGradients<BufferId> lay_out_output_gradients(MemoryLayout& layout, const std::string& name,
                                                        const BlockSizes& sizes);
BlockScratch<BufferId> lay_out_block_scratch(MemoryLayout& layout, const BlockSizes& sizes);

// y = block(x).   x, y X (B,T,C), not the same memory
void block_forward(Ops& ops, const TensorParallel& ranks, const Tensor& y, const Tensor& x,
                   const BlockTensors& parameters, const BlockActivations<Tensor>& saved,
                   const BlockScratch<Tensor>& scratch);

// Makes again what a block does not keep, of the x that its forward pass had. Where layernorms are made again, so are their
// mean and rstd, which are the same.
void block_recompute(Ops& ops, const TensorParallel& ranks, RecomputeKind kind, const Tensor& x,
                     const BlockTensors& parameters, const BlockActivations<Tensor>& saved,
                     const BlockScratch<Tensor>& scratch);

// dx holds the gradient of y and is overwritten with the gradient of x; `gradients` accumulate.
//   dx, x X (B,T,C)
void block_backward(Ops& ops, const TensorParallel& ranks, const Tensor& dx, const Tensor& x,
                    const BlockTensors& parameters, const BlockTensors& gradients,
                    const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch);

// The same in two parts, with the same bits: first dx and what the second part needs, then the parameters' gradients.
void block_backward_input(Ops& ops, const TensorParallel& ranks, const Tensor& dx, const Tensor& x,
                          const BlockTensors& parameters, const BlockOutputGradients<Tensor>& outputs,
                          const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch);
void block_backward_weight(Ops& ops, const TensorParallel& ranks, const Tensor& x,
                           const BlockTensors& parameters, const BlockTensors& gradients,
                           const BlockOutputGradients<Tensor>& outputs, const BlockActivations<Tensor>& saved,
                           const BlockScratch<Tensor>& scratch);

}  // namespace llmc
