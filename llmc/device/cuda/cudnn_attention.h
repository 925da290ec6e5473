// Causal attention by cuDNN, in bf16 (ops.h: attention_forward, attention_backward), as an alternative to our own
// kernels. no_cudnn.cpp stands in where the program is built without cuDNN's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "llmc/core/tensor.h"
#include "llmc/device/op_sizes.h"

namespace llmc::cuda {

class CudnnAttention {
  public:
    virtual ~CudnnAttention() = default;

    // For these sizes, and for a single sequence; cuDNN makes its plans for them here. UserError where it has none.
    virtual std::size_t workspace_bytes(const HeadSizes& sizes) = 0;
    virtual void set_workspace(void* workspace) = 0;
    virtual void forward(cudaStream_t stream, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                         const HeadSizes& sizes) = 0;
    // Gives the same bits each time.
    virtual void backward(cudaStream_t stream, const Tensor& dqkv, const Tensor& dout, const Tensor& qkv,
                          const Tensor& out, const Tensor& lse, const HeadSizes& sizes) = 0;
};

// UserError where this program has none, or this machine no library, with how to get it.
std::unique_ptr<CudnnAttention> make_cudnn_attention();

}  // namespace llmc::cuda
