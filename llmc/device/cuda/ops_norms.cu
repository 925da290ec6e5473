// Part of CudaOps: layernorm, RMS norm, and the RMS norm of heads.
#include <algorithm>

#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/head_norm_backward.cuh"
#include "llmc/device/cuda/head_norm_forward.cuh"
#include "llmc/device/cuda/layernorm_backward.cuh"
#include "llmc/device/cuda/layernorm_forward.cuh"
#include "llmc/device/cuda/rmsnorm_backward.cuh"
#include "llmc/device/cuda/rmsnorm_forward.cuh"
#include "llmc/device/head_operands.h"
#include "llmc/device/operands.h"

namespace llmc::cuda {

void CudaOps::layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& in,
                                const Tensor& gamma, const Tensor& beta) {
    const RowSizes s = layernorm_forward_sizes(out, mean, rstd, in, gamma, beta);
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::layernorm_forward(on(), elements<X>(out), elements<float>(mean), elements<float>(rstd),
                                elements<X>(in), elements<X>(gamma), elements<X>(beta), s.rows,
                                to_int(s.channels));
    });
}

void CudaOps::layernorm_backward(const Tensor& din, const Tensor& dgamma, const Tensor& dbeta,
                                 const Tensor& dout, const Tensor& in, const Tensor& gamma,
                                 const Tensor& mean, const Tensor& rstd) {
    const RowSizes s = layernorm_backward_sizes(din, dgamma, dbeta, dout, in, gamma, mean, rstd);
    void* const memory = workspace(layernorm_backward_workspace_bytes(chip_, to_int(s.channels)));
    with_kernel_type(dout.dtype, [&]<class X>() {
        cuda::layernorm_backward(on(), elements<X>(din), elements<float>(dgamma), elements<float>(dbeta),
                                 elements<X>(dout), elements<X>(in), elements<X>(gamma),
                                 elements<float>(mean), elements<float>(rstd), s.rows, to_int(s.channels),
                                 memory);
    });
}

void CudaOps::fused_residual_layernorm_forward(const Tensor& residual, const Tensor& out, const Tensor& mean,
                                               const Tensor& rstd, const Tensor& in1, const Tensor& in2,
                                               const Tensor& gamma, const Tensor& beta) {
    const RowSizes s = fused_residual_layernorm_sizes(residual, out, mean, rstd, in1, in2, gamma, beta);
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::fused_residual_layernorm_forward(on(), elements<X>(residual), elements<X>(out),
                                               elements<float>(mean), elements<float>(rstd), elements<X>(in1),
                                               elements<X>(in2), elements<X>(gamma), elements<X>(beta),
                                               s.rows, to_int(s.channels));
    });
}

void CudaOps::rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& in, const Tensor& weight,
                              float eps) {
    const RowSizes s = rmsnorm_forward_sizes(out, rstd, in, weight);
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::rmsnorm_forward(on(), elements<X>(out), elements<float>(rstd), elements<X>(in),
                              elements<X>(weight), eps, s.rows, to_int(s.channels));
    });
}

void CudaOps::rmsnorm_backward(const Tensor& din, const Tensor& dweight, const Tensor& dout, const Tensor& in,
                               const Tensor& weight, const Tensor& rstd) {
    const RowSizes s = rmsnorm_backward_sizes(din, dweight, dout, in, weight, rstd);
    void* const memory =
        dweight ? workspace(rmsnorm_backward_workspace_bytes(chip_, to_int(s.channels))) : nullptr;
    with_kernel_type(dout.dtype, [&]<class X>() {
        cuda::rmsnorm_backward(on(), elements<X>(din), elements<float>(dweight), elements<X>(dout),
                               elements<X>(in), elements<X>(weight), elements<float>(rstd), s.rows,
                               to_int(s.channels), memory);
    });
}

void CudaOps::fused_residual_rmsnorm_forward(const Tensor& residual, const Tensor& out, const Tensor& rstd,
                                             const Tensor& in1, const Tensor& in2, const Tensor& weight,
                                             float eps) {
    const RowSizes s = fused_residual_rmsnorm_sizes(residual, out, rstd, in1, in2, weight);
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::fused_residual_rmsnorm_forward(on(), elements<X>(residual), elements<X>(out),
                                             elements<float>(rstd), elements<X>(in1), elements<X>(in2),
                                             elements<X>(weight), eps, s.rows, to_int(s.channels));
    });
}

namespace {

RankSums rank_sums(const std::optional<SharedRows>& shared, const HeadNormSizes& s) {
    return {shared ? elements<float>(shared->sums) : nullptr, to_int(s.ranks), static_cast<float>(s.whole)};
}

}  // namespace

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

// RMS norm backward takes half of layernorm's (rmsnorm_backward.cuh). The largest norm of heads is over all heads.
}  // namespace llmc::cuda
