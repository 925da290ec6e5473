// Part of CudaOps: rotary positions and the norm of heads.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/head_norm.cuh"
#include "llmc/device/cuda/rope.cuh"
#include "llmc/device/head_operands.h"

namespace llmc::cuda {

namespace {

template <class X>
HeadPlaces<X> places(const Heads& heads) {
    return {elements<std::remove_const_t<X>>(heads.rows) + heads.first, row_elements(heads)};
}

RankSums rank_sums(const std::optional<SharedRows>& shared, const HeadNormSizes& s) {
    return {shared ? elements<float>(shared->sums) : nullptr, to_int(s.ranks), static_cast<float>(s.whole)};
}

}  // namespace

void CudaOps::rope(const Heads& x, const Tensor& angles, std::int64_t position, bool inverse) {
    const RopeSizes s = rope_sizes(x, angles, position);
    with_kernel_type(x.rows.dtype, [&]<class X>() {
        cuda::rope(on(), places<X>(x), elements<float>(angles), s.rows, s.sequence, to_int(s.heads),
                   to_int(s.head_size), position, inverse);
    });
}

void CudaOps::head_norm_forward(const Heads& out, const Tensor& rstd, const Heads& in, const Tensor& weight,
                                float eps, const std::optional<SharedRows>& shared) {
    const HeadNormSizes s = head_norm_forward_sizes(out, rstd, in, weight, shared);
    with_kernel_type(in.rows.dtype, [&]<class X>() {
        cuda::head_norm_forward(on(), places<X>(out), elements<float>(rstd), places<const X>(in),
                                elements<X>(weight), eps, rank_sums(shared, s), s.rows, to_int(s.heads),
                                to_int(s.head_size));
    });
}

void CudaOps::head_norm_sums(const Tensor& sums, const Heads& in) {
    const HeadNormSizes s = head_norm_sums_sizes(sums, in);
    with_kernel_type(in.rows.dtype, [&]<class X>() {
        cuda::head_norm_sums(on(), elements<float>(sums), places<const X>(in), s.rows, to_int(s.head_size));
    });
}

void CudaOps::head_norm_backward(const Heads& din, const Tensor& dweight, const Heads& dout, const Heads& in,
                                 const Tensor& weight, const Tensor& rstd,
                                 const std::optional<SharedRows>& shared) {
    const HeadNormSizes s = head_norm_backward_sizes(din, dweight, dout, in, weight, rstd, shared);
    void* const memory =
        dweight ? workspace(head_norm_backward_workspace_bytes(chip_, to_int(s.head_size))) : nullptr;
    with_kernel_type(in.rows.dtype, [&]<class X>() {
        cuda::head_norm_backward(on(), places<X>(din), elements<float>(dweight), places<const X>(dout),
                                 places<const X>(in), elements<X>(weight), elements<float>(rstd),
                                 rank_sums(shared, s), s.rows, to_int(s.heads), to_int(s.head_size), memory);
    });
}

void CudaOps::head_norm_backward_sums(const Tensor& sums, const Heads& dout, const Heads& in,
                                      const Tensor& weight, const Tensor& rstd) {
    const HeadNormSizes s = head_norm_backward_sums_sizes(sums, dout, in, weight, rstd);
    with_kernel_type(in.rows.dtype, [&]<class X>() {
        cuda::head_norm_backward_sums(on(), elements<float>(sums), places<const X>(dout), places<const X>(in),
                                      elements<X>(weight), elements<float>(rstd), s.rows,
                                      to_int(s.head_size));
    });
}

// A norm over all heads has the largest weight.
std::size_t CudaOps::head_norm_workspace_bytes(const WorkspaceRequest& request) const {
    return head_norm_backward_workspace_bytes(chip_, to_int(request.heads * request.size_of_head()));
}

}  // namespace llmc::cuda
