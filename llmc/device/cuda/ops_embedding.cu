// Part of CudaOps: the embedding and layernorm.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/encoder.cuh"
#include "llmc/device/cuda/layernorm_backward.cuh"
#include "llmc/device/cuda/layernorm_forward.cuh"
#include "llmc/device/operands.h"

namespace llmc::cuda {

namespace {

// The bytes of the order at the start of the workspace; the partial sums follow it.
std::size_t encoder_order_bytes(std::int64_t rows) {
    return SharedAllocator::bytes<std::int32_t>(static_cast<std::size_t>(rows));
}

std::size_t encoder_backward_workspace_bytes(std::int64_t rows, int channels) {
    return encoder_order_bytes(rows) +
           sizeof(float) * static_cast<std::size_t>(encoder_partials(rows, channels));
}

}  // namespace

void CudaOps::encoder_forward(const Tensor& out, const Tensor& tokens, const Tensor& wte, const Tensor& wpe,
                              std::optional<std::int64_t> first_row) {
    const EncoderSizes s = encoder_forward_sizes(out, tokens, wte, wpe);
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::encoder_forward(on(), elements<X>(out), elements<std::int32_t>(tokens), elements<X>(wte),
                              elements<X>(wpe), {first_row.value_or(0), to_int(s.rows_of_wte)},
                              to_int(s.batch), s.sequence, to_int(s.channels));
    });
}

void CudaOps::encoder_backward(const Tensor& dwte, const Tensor& dwpe, const Tensor& dout,
                               const Tensor& tokens, std::optional<std::int64_t> first_row) {
    const EncoderSizes s = encoder_backward_sizes(dwte, dwpe, dout, tokens);
    const std::int64_t rows = s.batch * s.sequence;
    auto* const memory =
        static_cast<std::byte*>(workspace(encoder_backward_workspace_bytes(rows, to_int(s.channels))));
    const EncoderScratch scratch{reinterpret_cast<std::int32_t*>(memory),
                                 reinterpret_cast<float*>(memory + encoder_order_bytes(rows))};
    with_kernel_type(dout.dtype, [&]<class X>() {
        cuda::encoder_backward(on(), elements<float>(dwte), elements<float>(dwpe), elements<X>(dout),
                               elements<std::int32_t>(tokens), {first_row.value_or(0), to_int(s.rows_of_wte)},
                               to_int(s.batch), s.sequence, to_int(s.channels), scratch);
    });
}

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

// RMS norm backward takes half of layernorm's (rmsnorm_backward.cuh).
std::size_t CudaOps::embedding_workspace_bytes(const WorkspaceRequest& request) const {
    return std::max(
        encoder_backward_workspace_bytes(request.batch * request.sequence, to_int(request.channels)),
        layernorm_backward_workspace_bytes(chip_, to_int(request.channels)));
}

}  // namespace llmc::cuda
