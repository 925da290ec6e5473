// Causal attention by cuDNN, in bf16 (ops.h: attention_forward, attention_backward), as an alternative to our
// own kernels. no_cudnn.cpp replaces it in a build without cuDNN's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "llmc/core/tensor.h"
#include "llmc/device/heads.h"
#include "llmc/device/ops.h"

namespace llmc::cuda {

// cuDNN does not take all sizes: an old one may refuse a window, for instance. A refusal is told once on
// standard error, with cuDNN's reason. Our own kernels then compute these sizes.
class CudnnAttention {
  public:
    virtual ~CudnnAttention() = default;

    // The workspace for these sizes, with q, k and v one after the other in the rows of one tensor, or with q
    // and k in those of another; 0 if cuDNN refuses them. cuDNN's plans for them are made here.
    virtual std::size_t workspace_bytes(const AttentionShape& sizes, bool queries_apart) = 0;
    virtual void set_workspace(void* workspace) = 0;
    // These do nothing and return false if cuDNN refuses the sizes or the places of the heads, or needs more
    // workspace for them than was planned.
    virtual bool forward(cudaStream_t stream, const Tensor& out, const Tensor& lse, const Heads& q,
                         const Heads& k, const Heads& v, const AttentionShape& sizes) = 0;
    // Deterministic: gives the same bits each time.
    virtual bool backward(cudaStream_t stream, const Heads& dq, const Heads& dk, const Heads& dv,
                          const Tensor& dout, const Heads& q, const Heads& k, const Heads& v,
                          const Tensor& out, const Tensor& lse, const AttentionShape& sizes) = 0;
};

// Throws a UserError that says how to get cuDNN if the build or this machine does not have it.
std::unique_ptr<CudnnAttention> make_cudnn_attention();

}  // namespace llmc::cuda
