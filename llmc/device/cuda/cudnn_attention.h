// Causal attention by cuDNN, in bf16 (ops.h: attention_forward, attention_backward), as an alternative to our
// own kernels. no_cudnn.cpp replaces it in a build without cuDNN's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "llmc/core/tensor.h"
#include "llmc/device/operands.h"

namespace llmc::cuda {

class CudnnAttention {
  public:
    virtual ~CudnnAttention() = default;

    // The workspace for these sizes. cuDNN's plans for them are made here. Throws a UserError if cuDNN has
    // none.
    virtual std::size_t workspace_bytes(const HeadSizes& sizes) = 0;
    virtual void set_workspace(void* workspace) = 0;
    virtual void forward(cudaStream_t stream, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                         const HeadSizes& sizes) = 0;
    // Deterministic: gives the same bits each time.
    virtual void backward(cudaStream_t stream, const Tensor& dqkv, const Tensor& dout, const Tensor& qkv,
                          const Tensor& out, const Tensor& lse, const HeadSizes& sizes) = 0;
};

// Throws a UserError that says how to get cuDNN if the build or this machine does not have it.
std::unique_ptr<CudnnAttention> make_cudnn_attention();

}  // namespace llmc::cuda
