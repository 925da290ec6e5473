// The end of the model: the last layernorm, the product with the token embedding, and the classifier. Logits
// are made for a few rows at a time and turned into their gradients in place, so that the full (B*T,V) logits
// never exist.
#pragma once

#include <cstdint>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/arenas.h"
#include "llmc/device/ops.h"
#include "llmc/model/config.h"
#include "llmc/model/units.h"

namespace llmc {

// The tensors of the units the head reads: parameters, or gradients of the same layout.
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

    template <class F>
    auto transform(F&& f) const {
        using To = decltype(f(ln_f));
        return HeadActivations<To>{f(ln_f), f(ln_f_mean), f(ln_f_rstd), f(dln_f), f(logits), f(losses)};
    }
};

// Rows of logits computed at a time: as many as take at most so many bytes.
std::int64_t head_rows(const GPTConfig& config, std::int64_t batch, DType dtype, std::int64_t logits_bytes);
HeadActivations<BufferId> lay_out_head(MemoryLayout& layout, const GPTConfig& config, std::int64_t batch,
                                       DType dtype, std::int64_t rows);

// losses = cross-entropy of each row of x against its target.   x X (B,T,C), targets int32 (B,T)
void head_forward(Ops& ops, const GPTConfig& config, const Tensor& x, const Tensor& targets,
                  const HeadTensors& parameters, const HeadActivations<Tensor>& saved);

// The same losses, and dx = the gradient of scale * sum(losses); `gradients` accumulate.
//   dx, x X (B,T,C), targets int32 (B,T)
void head_forward_backward(Ops& ops, const GPTConfig& config, const Tensor& dx, const Tensor& x,
                           const Tensor& targets, float scale, const HeadTensors& parameters,
                           const HeadTensors& gradients, const HeadActivations<Tensor>& saved);

// The logits of one position of the first sequence, for generation.   returns X (1,Vp)
Tensor head_logits(Ops& ops, const Tensor& x, std::int64_t position, const HeadTensors& parameters,
                   const HeadActivations<Tensor>& saved);

}  // namespace llmc
