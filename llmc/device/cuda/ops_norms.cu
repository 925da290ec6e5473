// Part of CudaOps: layernorm, RMS norm, and the RMS norm of heads.
#include <algorithm>

#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/head_norm_backward.cuh"
#include "llmc/device/cuda/head_norm_forward.cuh"
#include "llmc/device/cuda/norm_backward.cuh"
#include "llmc/device/cuda/norm_forward.cuh"

namespace llmc::cuda {

void CudaOps::compute(const LayerNormForward& op, const RowSizes& s) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::norm_forward<true, X>(on(), nullptr, elements<X>(op.out), elements<float>(op.mean),
                                    elements<float>(op.rstd), elements<X>(op.in), nullptr,
                                    elements<X>(op.gamma), elements<X>(op.beta), layernorm_epsilon, s.rows,
                                    to_int(s.channels));
    });
}

void CudaOps::compute(const FusedResidualLayerNormForward& op, const RowSizes& s) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::norm_forward<true, X>(on(), elements<X>(op.residual), elements<X>(op.out),
                                    elements<float>(op.mean), elements<float>(op.rstd), elements<X>(op.in1),
                                    elements<X>(op.in2), elements<X>(op.gamma), elements<X>(op.beta),
                                    layernorm_epsilon, s.rows, to_int(s.channels));
    });
}

void CudaOps::compute(const LayerNormBackward& op, const RowSizes& s) {
    void* const memory =
        op.dgamma ? workspace(norm_backward_workspace_bytes(chip_, to_int(s.channels))) : nullptr;
    with_kernel_type(op.dout.dtype, [&]<class X>() {
        cuda::norm_backward<true, X>(on(), elements<X>(op.din), elements<float>(op.dgamma),
                                     elements<float>(op.dbeta), elements<X>(op.dout), elements<X>(op.in),
                                     elements<X>(op.gamma), elements<float>(op.mean),
                                     elements<float>(op.rstd), s.rows, to_int(s.channels), memory);
    });
}

void CudaOps::compute(const RmsNormForward& op, const RowSizes& s) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::norm_forward<false, X>(on(), nullptr, elements<X>(op.out), nullptr, elements<float>(op.rstd),
                                     elements<X>(op.in), nullptr, elements<X>(op.weight), nullptr, op.eps,
                                     s.rows, to_int(s.channels));
    });
}

void CudaOps::compute(const FusedResidualRmsNormForward& op, const RowSizes& s) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::norm_forward<false, X>(on(), elements<X>(op.residual), elements<X>(op.out), nullptr,
                                     elements<float>(op.rstd), elements<X>(op.in1), elements<X>(op.in2),
                                     elements<X>(op.weight), nullptr, op.eps, s.rows, to_int(s.channels));
    });
}

void CudaOps::compute(const RmsNormBackward& op, const RowSizes& s) {
    void* const memory =
        op.dweight ? workspace(norm_backward_workspace_bytes(chip_, to_int(s.channels))) : nullptr;
    with_kernel_type(op.dout.dtype, [&]<class X>() {
        cuda::norm_backward<false, X>(on(), elements<X>(op.din), elements<float>(op.dweight), nullptr,
                                      elements<X>(op.dout), elements<X>(op.in), elements<X>(op.weight),
                                      nullptr, elements<float>(op.rstd), s.rows, to_int(s.channels), memory);
    });
}

namespace {

RankSums rank_sums(const SharedRows& shared, const HeadNormSizes& s) {
    return {elements<float>(shared.sums), to_int(s.ranks), static_cast<float>(s.whole)};
}

}  // namespace

void CudaOps::compute(const HeadNormForward& op, const HeadNormSizes& s) {
    with_kernel_type(op.in.rows.dtype, [&]<class X>() {
        cuda::head_norm_forward(on(), places<X>(op.out), elements<float>(op.rstd), places<const X>(op.in),
                                elements<X>(op.weight), op.eps, rank_sums(op.shared, s), s.rows,
                                to_int(s.heads), to_int(s.head_size));
    });
}

void CudaOps::compute(const HeadNormSums& op, const HeadNormSizes& s) {
    with_kernel_type(op.in.rows.dtype, [&]<class X>() {
        cuda::head_norm_sums(on(), elements<float>(op.sums), places<const X>(op.in), s.rows,
                             to_int(s.head_size));
    });
}

void CudaOps::compute(const HeadNormBackward& op, const HeadNormSizes& s) {
    void* const memory =
        op.dweight ? workspace(head_norm_backward_workspace_bytes(chip_, to_int(s.head_size))) : nullptr;
    with_kernel_type(op.in.rows.dtype, [&]<class X>() {
        cuda::head_norm_backward(on(), places<X>(op.din), elements<float>(op.dweight),
                                 places<const X>(op.dout), places<const X>(op.in), elements<X>(op.weight),
                                 elements<float>(op.rstd), rank_sums(op.shared, s), s.rows, to_int(s.heads),
                                 to_int(s.head_size), memory);
    });
}

void CudaOps::compute(const HeadNormBackwardSums& op, const HeadNormSizes& s) {
    with_kernel_type(op.in.rows.dtype, [&]<class X>() {
        cuda::head_norm_backward_sums(on(), elements<float>(op.sums), places<const X>(op.dout),
                                      places<const X>(op.in), elements<X>(op.weight),
                                      elements<float>(op.rstd), s.rows, to_int(s.head_size));
    });
}

}  // namespace llmc::cuda
