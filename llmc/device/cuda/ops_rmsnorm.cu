// Part of CudaOps: RMS norm.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/rmsnorm_backward.cuh"
#include "llmc/device/cuda/rmsnorm_forward.cuh"
#include "llmc/device/operands.h"

namespace llmc::cuda {

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

}  // namespace llmc::cuda
