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
    return {s.batch,         to_int(s.sequence), to_int(s.heads), to_int(s.head_size), to_int(s.key_heads),
            to_int(s.window)};
}

// The kernels read and write 16 bytes at a time.
template <class X>
RowHeads<X> kernel_heads(const Heads& heads) {
    constexpr std::int64_t pack = 16 / static_cast<std::int64_t>(sizeof(X));
    const std::int64_t row = heads.rows.shape.last();
    check(heads.first % pack == 0 && row % pack == 0, "heads of attention begin at multiples of 16 bytes");
    return {elements<X>(heads.rows) + heads.first, to_int(row)};
}
template <class X>
QueryKeyValue<X> kernel_heads(const Heads& q, const Heads& k, const Heads& v) {
    return {kernel_heads<X>(q), kernel_heads<X>(k), kernel_heads<X>(v)};
}
template <class X>
QueryKeyValue<const X> kernel_inputs(const Heads& q, const Heads& k, const Heads& v) {
    const auto [of_q, of_k, of_v] = kernel_heads<X>(q, k, v);
    return {{of_q.first, of_q.stride}, {of_k.first, of_k.stride}, {of_v.first, of_v.stride}};
}

}  // namespace

void CudaOps::attention_forward(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                                const Heads& v, std::int64_t window) {
    const HeadSizes s = attention_forward_sizes(out, lse, q, k, v, window);
    if (cudnn_ && out.dtype == DType::bf16 && cudnn_->forward(streams_.selected(), out, lse, q, k, v, s))
        return wait_if_asked("cuDNN's attention_forward");
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::attention_forward(on(), elements<X>(out), elements<float>(lse), kernel_inputs<X>(q, k, v),
                                kernel_sizes(s));
    });
}

void CudaOps::attention_backward(const Heads& dq, const Heads& dk, const Heads& dv, const Tensor& dout,
                                 const Heads& q, const Heads& k, const Heads& v, const Tensor& out,
                                 const Tensor& lse, std::int64_t window) {
    const HeadSizes s = attention_backward_sizes(dq, dk, dv, dout, q, k, v, out, lse, window);
    if (cudnn_ && out.dtype == DType::bf16 &&
        cudnn_->backward(streams_.selected(), dq, dk, dv, dout, q, k, v, out, lse, s))
        return wait_if_asked("cuDNN's attention_backward");
    const AttentionSizes sizes = kernel_sizes(s);
    void* const memory = workspace(attention_backward_workspace_bytes(sizes));
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::attention_backward(on(), kernel_heads<X>(dq, dk, dv), elements<X>(dout),
                                 kernel_inputs<X>(q, k, v), elements<X>(out), elements<float>(lse), memory,
                                 sizes);
    });
}

void CudaOps::attention_cached_forward(const Tensor& out, const Tensor& cache, const Heads& q, const Heads& k,
                                       const Heads& v, std::int64_t position, std::int64_t window) {
    const CachedHeadSizes s = attention_cached_forward_sizes(out, cache, q, k, v, position, window);
    // The most rows of a grid.
    constexpr std::int64_t most = 65535;
    for (std::int64_t first = 0; first < s.rows; first += most) {
        const std::int64_t rows = std::min(most, s.rows - first);
        const CachedAttentionSizes sizes{to_int(rows),        to_int(position + first), to_int(s.heads),
                                         to_int(s.head_size), to_int(s.key_heads),      to_int(s.window)};
        with_kernel_type(out.dtype, [&]<class X>() {
            QueryKeyValue<const X> qkv = kernel_inputs<X>(q, k, v);
            for (RowHeads<const X>* heads : {&qkv.q, &qkv.k, &qkv.v}) heads->first += first * heads->stride;
            cuda::attention_cached_forward(on(), elements<X>(out.slice(first, rows)), elements<X>(cache), qkv,
                                           sizes);
        });
    }
}

}  // namespace llmc::cuda
