// The end of the model: the last layernorm, the product with the token embedding, and the classifier. Logits
// are made for a few rows at a time and turned into their gradients in place, so that the full (B*T,V) logits
// never exist.
#pragma once

#include <cstdint>
#include <optional>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/arenas.h"
#include "llmc/device/ops.h"
#include "llmc/model/block.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/model/units.h"

namespace llmc {

// The tensors of the units the head reads: parameters, or gradients of the same layout. Of ranks that share the embedding
// (tensor_parallel.h), each has the rows, and of the logits the columns, of some tokens.
struct HeadTensors {
    Tensor ln_f_weight, ln_f_bias;  // (C)
    Tensor wte;                     // (Vp,C)
};

template <class Buffer>
struct HeadActivations {
    Buffer ln_f, ln_f_mean, ln_f_rstd;  // (B,T,C), fp32 (B,T) twice
    Buffer dln_f;                       // (B,T,C)
    Buffer logits;                      // (head_rows, Vp)
    Buffer losses;                      // fp32 (B*T)
    // Where ranks share the logits: what they tell each other of their columns, fp32 (R, head_rows, 3); one row of all
    // columns, X (R, Vp); and with sequence parallelism the rows of all, X (B,T,C).
    std::optional<Buffer> statistics, all_columns, gathered;

    template <class F>
    auto transform(F&& f) const {
        using To = decltype(f(ln_f));
        HeadActivations<To> to{f(ln_f),   f(ln_f_mean), f(ln_f_rstd), f(dln_f), f(logits),
                               f(losses), {},           {},           {}};
        if (statistics) to.statistics = f(*statistics);
        if (all_columns) to.all_columns = f(*all_columns);
        if (gathered) to.gathered = f(*gathered);
        return to;
    }
};

// Rows of logits computed at a time: as many as take at most so many bytes.
std::int64_t head_rows(const BlockSizes& sizes, std::int64_t logits_bytes);
HeadActivations<BufferId> lay_out_head(MemoryLayout& layout, const BlockSizes& sizes, std::int64_t rows);

// losses = cross-entropy of each row of x against its target.   x X (B,T,C), targets int32 (B,T)
void head_forward(Ops& ops, const TensorParallel& ranks, const GPTConfig& config, const Tensor& x,
                  const Tensor& targets, const HeadTensors& parameters, const HeadActivations<Tensor>& saved);

// The same losses, and dx = the gradient of scale * sum(losses); `gradients` accumulate.
//   dx, x X (B,T,C), targets int32 (B,T)
void head_forward_backward(Ops& ops, const TensorParallel& ranks, const GPTConfig& config, const Tensor& dx,
                           const Tensor& x, const Tensor& targets, float scale, const HeadTensors& parameters,
                           const HeadTensors& gradients, const HeadActivations<Tensor>& saved);

// The logits of one row, which every rank has, for generation.   row X (1,1,C); returns X (1,Vp), Vp that of all ranks
// together
Tensor head_logits(Ops& ops, const TensorParallel& ranks, const Tensor& row, const HeadTensors& parameters,
                   const HeadActivations<Tensor>& saved);

}  // namespace llmc
