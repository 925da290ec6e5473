// The beginning of the model: the token embedding and the position embedding, added.
#pragma once

#include "llmc/core/tensor.h"
#include "llmc/device/ops.h"
#include "llmc/model/tensor_parallel.h"

namespace llmc {

// out = wte[tokens] + wpe.   out X (B,T,C), or a rank's own tokens of it; tokens int32 (B,T); wte X (Vp,C), or a rank's rows;
// scratch X (B,T,C)
void embedding_forward(Ops& ops, const TensorParallel& ranks, const Tensor& out, const Tensor& tokens,
                       const Tensor& wte, const Tensor& wpe, const Tensor& scratch);

// dwte, dwpe fp32 accumulate; gathered X (B,T,C) with sequence parallelism
void embedding_backward(Ops& ops, const TensorParallel& ranks, const Tensor& dwte, const Tensor& dwpe,
                        const Tensor& dout, const Tensor& tokens, const std::optional<Tensor>& gathered);

}  // namespace llmc
