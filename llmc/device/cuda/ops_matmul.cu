// Part of CudaOps: matrix products with their bias, activations, and the cap of logits.
//
// GELU is a kernel of its own. It reads the rounded product, so that recomputing GELU from that stored
// product gives the same bits. The epilogue of cuBLASLt does not guarantee that.
#include "llmc/device/cuda/bias_gradient.cuh"
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/fp8.cuh"
#include "llmc/device/cuda/gelu.cuh"
#include "llmc/device/cuda/relu_squared.cuh"
#include "llmc/device/cuda/soft_cap.cuh"
#include "llmc/device/cuda/swiglu.cuh"
#include "llmc/device/operands.h"

namespace llmc::cuda {

void CudaOps::matmul_forward(const Tensor& out, const Tensor& in, const Tensor& weight, const Tensor& bias,
                             const Tensor& pre_gelu) {
    const MatmulSizes s = matmul_forward_sizes(out, in, weight, bias, pre_gelu);
    products_.overwrite(pre_gelu ? pre_gelu : out, {in, s.rows, s.in_channels},
                        {weight, s.out_channels, s.in_channels, true}, bias);
    if (pre_gelu) gelu_forward(out, pre_gelu);
}

void CudaOps::matmul_backward(const Tensor& din, const Tensor& dweight, const Tensor& dbias,
                              const Tensor& dout, const Tensor& in, const Tensor& weight,
                              const Tensor& pre_gelu) {
    const MatmulSizes s = matmul_backward_sizes(din, dweight, dbias, dout, in, weight, pre_gelu);
    if (dweight)
        products_.accumulate(dweight, {dout, s.rows, s.out_channels, true}, {in, s.rows, s.in_channels});
    if (dbias) {
        with_kernel_type(dout.dtype, [&]<class X>() {
            const int columns = to_int(s.out_channels);
            void* const memory = workspace(bias_gradient_workspace_bytes<X>(chip_, s.rows, columns));
            bias_gradient(on(), elements<float>(dbias), elements<X>(dout), s.rows, columns, memory);
        });
    }
    if (!din) return;
    products_.overwrite(din, {dout, s.rows, s.out_channels}, {weight, s.out_channels, s.in_channels}, {});
    if (pre_gelu) gelu_backward(din, din, pre_gelu);
}

void CudaOps::amax(const Tensor& out, const Tensor& x) {
    check_elements(out, DType::fp32, 1, "out");
    cuda::amax(on(), elements<float>(out), elements<bf16>(x), x.elements());
}

void CudaOps::quantise_to_bytes(const Fp8Copies& to, const Tensor& x, const Tensor& amax, Fp8 format) {
    const Shape rows = x.rows().shape;
    check(to.plain || to.transposed, "a tensor in 8 bits has a copy");
    if (to.plain) check_rows(to.plain, DType::uint8, rows[0], rows[1], "plain");
    if (to.transposed) check_rows(to.transposed, DType::uint8, rows[1], rows[0], "transposed");
    check_elements(to.inverse, DType::fp32, 1, "inverse");
    check_elements(amax, DType::fp32, 1, "amax");
    const auto quantise = [&]<Fp8 as>() {
        cuda::quantise<as>(on(), elements<std::uint8_t>(to.plain), elements<std::uint8_t>(to.transposed),
                           elements<float>(to.inverse), elements<bf16>(x), elements<float>(amax), rows[0],
                           rows[1]);
    };
    format == Fp8::e4m3 ? quantise.operator()<Fp8::e4m3>() : quantise.operator()<Fp8::e5m2>();
}

// cuBLASLt's products in 8 bits read both factors along the sum, so that b is always a transposed matrix.
void CudaOps::fp8_matmul_forward(const Tensor& out, const Fp8Copies& in, const Fp8Copies& weight,
                                 const Tensor& bias, const Tensor& pre_gelu) {
    const Shape of_in = in.plain.rows().shape, of_weight = weight.plain.rows().shape;
    check_rows(out, DType::bf16, of_in[0], of_weight[0], "out");
    if (bias) check_elements(bias, DType::bf16, of_weight[0], "bias");
    if (pre_gelu) check_rows(pre_gelu, DType::bf16, of_in[0], of_weight[0], "pre_gelu");
    products_.overwrite(
        pre_gelu ? pre_gelu : out, {in.plain, of_in[0], of_in[1], false, {{Fp8::e4m3, in.inverse}}},
        {weight.plain, of_weight[0], of_weight[1], true, {{Fp8::e4m3, weight.inverse}}}, bias);
    if (pre_gelu) gelu_forward(out, pre_gelu);
}

void CudaOps::fp8_matmul_backward(const Tensor& din, const Tensor& dweight, const Fp8Copies& dout,
                                  const Fp8Copies& in, const Fp8Copies& weight, const Tensor& pre_gelu) {
    if (dweight) {
        const Shape of_dout = dout.transposed.rows().shape, of_in = in.transposed.rows().shape;
        check_elements(dweight, DType::fp32, of_dout[0] * of_in[0], "dweight");
        products_.accumulate(dweight,
                             {dout.transposed, of_dout[0], of_dout[1], false, {{Fp8::e5m2, dout.inverse}}},
                             {in.transposed, of_in[0], of_in[1], true, {{Fp8::e4m3, in.inverse}}});
    }
    if (!din) return;
    const Shape of_dout = dout.plain.rows().shape, of_weight = weight.transposed.rows().shape;
    check_rows(din, DType::bf16, of_dout[0], of_weight[0], "din");
    products_.overwrite(din, {dout.plain, of_dout[0], of_dout[1], false, {{Fp8::e5m2, dout.inverse}}},
                        {weight.transposed, of_weight[0], of_weight[1], true, {{Fp8::e4m3, weight.inverse}}},
                        {});
    if (pre_gelu) gelu_backward(din, din, pre_gelu);
}

void CudaOps::gelu_forward(const Tensor& out, const Tensor& in) {
    check_elements(out, in.dtype, in.elements(), "out");
    with_kernel_type(in.dtype, [&]<class X>() {
        cuda::gelu_forward(on(), elements<X>(out), elements<X>(in), in.elements());
    });
}

void CudaOps::gelu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) {
    check_elements(din, in.dtype, in.elements(), "din");
    check_elements(dout, in.dtype, in.elements(), "dout");
    with_kernel_type(in.dtype, [&]<class X>() {
        cuda::gelu_backward(on(), elements<X>(din), elements<X>(dout), elements<X>(in), in.elements());
    });
}

void CudaOps::swiglu_forward(const Tensor& out, const Tensor& in) {
    const RowSizes s = swiglu_forward_sizes(out, in);
    with_kernel_type(in.dtype, [&]<class X>() {
        cuda::swiglu_forward(on(), elements<X>(out), elements<X>(in), s.rows, to_int(s.channels));
    });
}

void CudaOps::swiglu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) {
    const RowSizes s = swiglu_backward_sizes(din, dout, in);
    with_kernel_type(in.dtype, [&]<class X>() {
        cuda::swiglu_backward(on(), elements<X>(din), elements<X>(dout), elements<X>(in), s.rows,
                              to_int(s.channels));
    });
}

void CudaOps::relu_squared_forward(const Tensor& out, const Tensor& in) {
    check_elements(out, in.dtype, in.elements(), "out");
    with_kernel_type(in.dtype, [&]<class X>() {
        cuda::relu_squared_forward(on(), elements<X>(out), elements<X>(in), in.elements());
    });
}

void CudaOps::relu_squared_backward(const Tensor& din, const Tensor& dout, const Tensor& in) {
    check_elements(din, in.dtype, in.elements(), "din");
    check_elements(dout, in.dtype, in.elements(), "dout");
    with_kernel_type(in.dtype, [&]<class X>() {
        cuda::relu_squared_backward(on(), elements<X>(din), elements<X>(dout), elements<X>(in),
                                    in.elements());
    });
}

void CudaOps::soft_cap(const Tensor& out, const Tensor& in, float cap) {
    check_soft_cap(out, in, cap);
    with_kernel_type(in.dtype, [&]<class X>() {
        cuda::soft_cap(on(), elements<X>(out), elements<X>(in), cap, in.elements());
    });
}

}  // namespace llmc::cuda
