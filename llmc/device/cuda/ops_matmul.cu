// Part of CudaOps: matrix products with their bias, activations, and the cap of logits.
//
// GELU is a kernel of its own. It reads the rounded product, so that recomputing GELU from that stored
// product gives the same bits. The epilogue of cuBLASLt does not guarantee that.
#include "llmc/device/cuda/bias_gradient.cuh"
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/fp8.cuh"
#include "llmc/device/cuda/gelu.cuh"
#include "llmc/device/cuda/nf4.cuh"
#include "llmc/device/cuda/relu_squared.cuh"
#include "llmc/device/cuda/soft_cap.cuh"
#include "llmc/device/cuda/swiglu.cuh"

namespace llmc::cuda {

void CudaOps::compute(const MatmulForward& op, const MatmulSizes& s) {
    products_.overwrite(op.pre_gelu ? op.pre_gelu : op.out, {op.in, s.rows, s.in_channels},
                        {op.weight, s.out_channels, s.in_channels, true}, op.bias);
    if (op.pre_gelu) run(GeluForward{op.out, op.pre_gelu});
}

void CudaOps::compute(const MatmulBackward& op, const MatmulSizes& s) {
    if (op.dweight)
        products_.accumulate(op.dweight, {op.dout, s.rows, s.out_channels, true},
                             {op.in, s.rows, s.in_channels});
    if (op.dbias) {
        with_kernel_type(op.dout.dtype, [&]<class X>() {
            const int columns = to_int(s.out_channels);
            void* const memory = workspace(bias_gradient_workspace_bytes<X>(chip_, s.rows, columns));
            bias_gradient(on(), elements<float>(op.dbias), elements<X>(op.dout), s.rows, columns, memory);
        });
    }
    if (!op.din) return;
    products_.overwrite(op.din, {op.dout, s.rows, s.out_channels}, {op.weight, s.out_channels, s.in_channels},
                        {});
    if (op.pre_gelu) run(GeluBackward{op.din, op.din, op.pre_gelu});
}

void CudaOps::compute(const MatmulAdd& op, const MatmulSizes&) {
    const auto matrix = [](const Heads& of, bool is_transposed) {
        return LtMatrix{of.rows,      number_of_rows(of), of.count * of.size, is_transposed,
                        std::nullopt, of.first,           row_elements(of)};
    };
    products_.accumulate(matrix(op.out, false), matrix(op.a, op.a_transposed), matrix(op.b, op.b_transposed),
                         op.scale);
}

void CudaOps::compute(const DequantiseNf4& op, std::int64_t n) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        dequantise_nf4(on(), elements<X>(op.out), reinterpret_cast<const std::uint32_t*>(op.in.data), n);
    });
}

void CudaOps::compute(const Amax& op, std::int64_t n) {
    cuda::amax(on(), elements<float>(op.out), elements<bf16>(op.x), n);
}

void CudaOps::compute(const QuantiseToBytes& op, const RowSizes& s) {
    const auto quantise = [&]<Fp8 as>() {
        cuda::quantise<as>(on(), elements<std::uint8_t>(op.to.plain),
                           elements<std::uint8_t>(op.to.transposed), elements<float>(op.to.inverse),
                           elements<bf16>(op.x), elements<float>(op.amax), s.rows, s.channels);
    };
    op.format == Fp8::e4m3 ? quantise.operator()<Fp8::e4m3>() : quantise.operator()<Fp8::e5m2>();
}

// cuBLASLt's products in 8 bits read both factors along the sum, so that b is always a transposed matrix.
void CudaOps::compute(const Fp8MatmulForward& op, const MatmulSizes& s) {
    products_.overwrite(
        op.pre_gelu ? op.pre_gelu : op.out,
        {op.in.plain, s.rows, s.in_channels, false, {{Fp8::e4m3, op.in.inverse}}},
        {op.weight.plain, s.out_channels, s.in_channels, true, {{Fp8::e4m3, op.weight.inverse}}}, op.bias);
    if (op.pre_gelu) run(GeluForward{op.out, op.pre_gelu});
}

void CudaOps::compute(const Fp8MatmulBackward& op, const MatmulSizes& s) {
    if (op.dweight)
        products_.accumulate(
            op.dweight, {op.dout.transposed, s.out_channels, s.rows, false, {{Fp8::e5m2, op.dout.inverse}}},
            {op.in.transposed, s.in_channels, s.rows, true, {{Fp8::e4m3, op.in.inverse}}});
    if (!op.din) return;
    products_.overwrite(
        op.din, {op.dout.plain, s.rows, s.out_channels, false, {{Fp8::e5m2, op.dout.inverse}}},
        {op.weight.transposed, s.in_channels, s.out_channels, true, {{Fp8::e4m3, op.weight.inverse}}}, {});
    if (op.pre_gelu) run(GeluBackward{op.din, op.din, op.pre_gelu});
}

void CudaOps::compute(const GeluForward& op, std::int64_t n) {
    with_kernel_type(op.in.dtype, [&]<class X>() {
        cuda::gelu_forward(on(), elements<X>(op.out), elements<X>(op.in), n);
    });
}

void CudaOps::compute(const GeluBackward& op, std::int64_t n) {
    with_kernel_type(op.in.dtype, [&]<class X>() {
        cuda::gelu_backward(on(), elements<X>(op.din), elements<X>(op.dout), elements<X>(op.in), n);
    });
}

void CudaOps::compute(const SwigluForward& op, const RowSizes& s) {
    with_kernel_type(op.in.dtype, [&]<class X>() {
        cuda::swiglu_forward(on(), elements<X>(op.out), elements<X>(op.in), s.rows, to_int(s.channels));
    });
}

void CudaOps::compute(const SwigluBackward& op, const RowSizes& s) {
    with_kernel_type(op.in.dtype, [&]<class X>() {
        cuda::swiglu_backward(on(), elements<X>(op.din), elements<X>(op.dout), elements<X>(op.in), s.rows,
                              to_int(s.channels));
    });
}

void CudaOps::compute(const ReluSquaredForward& op, std::int64_t n) {
    with_kernel_type(op.in.dtype, [&]<class X>() {
        cuda::relu_squared_forward(on(), elements<X>(op.out), elements<X>(op.in), n);
    });
}

void CudaOps::compute(const ReluSquaredBackward& op, std::int64_t n) {
    with_kernel_type(op.in.dtype, [&]<class X>() {
        cuda::relu_squared_backward(on(), elements<X>(op.din), elements<X>(op.dout), elements<X>(op.in), n);
    });
}

void CudaOps::compute(const llmc::SoftCap& op, std::int64_t n) {
    with_kernel_type(op.in.dtype, [&]<class X>() {
        cuda::soft_cap(on(), elements<X>(op.out), elements<X>(op.in), op.cap, n);
    });
}

}  // namespace llmc::cuda
