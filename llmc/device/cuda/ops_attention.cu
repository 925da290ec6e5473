// Part of CudaOps: attention, by our own kernels or by cuDNN.
#include <algorithm>

#include "llmc/device/cuda/attention_backward.cuh"
#include "llmc/device/cuda/attention_cached_forward.cuh"
#include "llmc/device/cuda/attention_forward.cuh"
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/cudnn_attention.h"

namespace llmc::cuda {

namespace {

AttentionSizes kernel_sizes(const AttentionShape& s) {
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

void CudaOps::compute(const AttentionForward& op, const AttentionShape& s) {
    if (cudnn_ && op.out.dtype == DType::bf16 &&
        cudnn_->forward(streams_.selected(), op.out, op.lse, op.q, op.k, op.v, s))
        return wait_if_asked("cuDNN's attention_forward");
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::attention_forward(on(), elements<X>(op.out), elements<float>(op.lse),
                                kernel_inputs<X>(op.q, op.k, op.v), kernel_sizes(s));
    });
}

void CudaOps::compute(const AttentionBackward& op, const AttentionShape& s) {
    if (cudnn_ && op.out.dtype == DType::bf16 &&
        cudnn_->backward(streams_.selected(), op.dq, op.dk, op.dv, op.dout, op.q, op.k, op.v, op.out, op.lse,
                         s))
        return wait_if_asked("cuDNN's attention_backward");
    const AttentionSizes sizes = kernel_sizes(s);
    void* const memory = workspace(attention_backward_workspace_bytes(sizes));
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::attention_backward(on(), kernel_heads<X>(op.dq, op.dk, op.dv), elements<X>(op.dout),
                                 kernel_inputs<X>(op.q, op.k, op.v), elements<X>(op.out),
                                 elements<float>(op.lse), memory, sizes);
    });
}

void CudaOps::compute(const AttentionCachedForward& op, const CachedAttentionShape& s) {
    // The most rows of a grid.
    constexpr std::int64_t most = 65535;
    for (std::int64_t first = 0; first < s.rows; first += most) {
        const std::int64_t rows = std::min(most, s.rows - first);
        const CachedAttentionSizes sizes{to_int(rows),        to_int(op.position + first), to_int(s.heads),
                                         to_int(s.head_size), to_int(s.key_heads),         to_int(s.window)};
        with_kernel_type(op.out.dtype, [&]<class X>() {
            QueryKeyValue<const X> qkv = kernel_inputs<X>(op.q, op.k, op.v);
            for (RowHeads<const X>* heads : {&qkv.q, &qkv.k, &qkv.v}) heads->first += first * heads->stride;
            cuda::attention_cached_forward(on(), elements<X>(op.out.slice(first, rows)),
                                           elements<X>(op.cache), qkv, sizes);
        });
    }
}

}  // namespace llmc::cuda
