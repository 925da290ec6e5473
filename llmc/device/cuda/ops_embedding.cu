// Part of CudaOps: the embedding and rotary positions.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/encoder.cuh"
#include "llmc/device/cuda/rope.cuh"

namespace llmc::cuda {

void CudaOps::compute(const EncoderForward& op, const EncoderSizes& s) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::encoder_forward(on(), elements<X>(op.out), elements<std::int32_t>(op.tokens),
                              elements<X>(op.wte), elements<X>(op.wpe),
                              {op.first_row.value_or(0), to_int(s.rows_of_wte)}, to_int(s.batch), s.sequence,
                              to_int(s.channels));
    });
}

void CudaOps::compute(const EncoderBackward& op, const EncoderSizes& s) {
    const std::int64_t rows = s.batch * s.sequence;
    auto* const memory =
        static_cast<std::byte*>(workspace(encoder_backward_workspace_bytes(rows, to_int(s.channels))));
    const EncoderScratch scratch{reinterpret_cast<std::int32_t*>(memory),
                                 reinterpret_cast<float*>(memory + encoder_order_bytes(rows))};
    with_kernel_type(op.dout.dtype, [&]<class X>() {
        cuda::encoder_backward(on(), elements<float>(op.dwte), elements<float>(op.dwpe), elements<X>(op.dout),
                               elements<std::int32_t>(op.tokens),
                               {op.first_row.value_or(0), to_int(s.rows_of_wte)}, to_int(s.batch), s.sequence,
                               to_int(s.channels), scratch);
    });
}

void CudaOps::compute(const Rope& op, const RopeSizes& s) {
    with_kernel_type(op.x.rows.dtype, [&]<class X>() {
        cuda::rope(on(), places<X>(op.x), elements<float>(op.angles), s.rows, s.sequence, to_int(s.heads),
                   to_int(s.head_size), op.position, op.inverse);
    });
}

}  // namespace llmc::cuda
