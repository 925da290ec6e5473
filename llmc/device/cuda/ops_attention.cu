// Part of CudaOps: attention, by our own kernels or by cuDNN.
#include <algorithm>

#include "llmc/device/cuda/attention_backward.cuh"
#include "llmc/device/cuda/attention_cached_forward.cuh"
#include "llmc/device/cuda/attention_forward.cuh"
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/cudnn_attention.h"
#include "llmc/device/operands.h"

namespace llmc::cuda {

namespace {

AttentionSizes kernel_sizes(const HeadSizes& s) {
    return {s.batch, to_int(s.sequence), to_int(s.heads), to_int(s.head_size)};
}

}  // namespace

void CudaOps::attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv) {
    const HeadSizes s = attention_forward_sizes(out, lse, qkv);
    if (cudnn_ && qkv.dtype == DType::bf16) {
        cudnn_->forward(streams_.selected(), out, lse, qkv, s);
        return wait_if_asked("cuDNN's attention_forward");
    }
    with_kernel_type(qkv.dtype, [&]<class X>() {
        cuda::attention_forward(on(), elements<X>(out), elements<float>(lse), elements<X>(qkv),
                                kernel_sizes(s));
    });
}

void CudaOps::attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& qkv, const Tensor& out,
                                 const Tensor& lse) {
    const HeadSizes s = attention_backward_sizes(dqkv, dout, qkv, out, lse);
    if (cudnn_ && qkv.dtype == DType::bf16) {
        cudnn_->backward(streams_.selected(), dqkv, dout, qkv, out, lse, s);
        return wait_if_asked("cuDNN's attention_backward");
    }
    const AttentionSizes sizes = kernel_sizes(s);
    void* const memory = workspace(attention_backward_workspace_bytes(sizes));
    with_kernel_type(qkv.dtype, [&]<class X>() {
        cuda::attention_backward(on(), elements<X>(dqkv), elements<X>(dout), elements<X>(qkv),
                                 elements<X>(out), elements<float>(lse), memory, sizes);
    });
}

void CudaOps::attention_cached_forward(const Tensor& out, const Tensor& cache, const Tensor& qkv,
                                       std::int64_t position) {
    const CachedHeadSizes s = attention_cached_forward_sizes(out, cache, qkv, position);
    // The most rows of a grid.
    constexpr std::int64_t most = 65535;
    for (std::int64_t first = 0; first < s.rows; first += most) {
        const std::int64_t rows = std::min(most, s.rows - first);
        const CachedAttentionSizes sizes{to_int(rows), to_int(position + first), to_int(s.heads),
                                         to_int(s.head_size)};
        with_kernel_type(qkv.dtype, [&]<class X>() {
            cuda::attention_cached_forward(on(), elements<X>(out.slice(first, rows)), elements<X>(cache),
                                           elements<X>(qkv.slice(first, rows)), sizes);
        });
    }
}

std::size_t CudaOps::attention_workspace_bytes(const WorkspaceRequest& request) const {
    const HeadSizes s{request.batch, request.sequence, request.heads, request.size_of_head()};
    if (cudnn_ && request.dtype == DType::bf16) return cudnn_->workspace_bytes(s);
    return attention_backward_workspace_bytes(kernel_sizes(s));
}

}  // namespace llmc::cuda
