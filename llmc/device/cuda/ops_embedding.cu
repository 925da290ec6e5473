// Part of CudaOps: the embedding and rotary positions.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/encoder.cuh"
#include "llmc/device/cuda/rope.cuh"
#include "llmc/device/head_operands.h"
#include "llmc/device/operands.h"

namespace llmc::cuda {

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

void CudaOps::rope(const Heads& x, const Tensor& angles, std::int64_t position, bool inverse) {
    const RopeSizes s = rope_sizes(x, angles, position);
    with_kernel_type(x.rows.dtype, [&]<class X>() {
        cuda::rope(on(), places<X>(x), elements<float>(angles), s.rows, s.sequence, to_int(s.heads),
                   to_int(s.head_size), position, inverse);
    });
}

}  // namespace llmc::cuda
