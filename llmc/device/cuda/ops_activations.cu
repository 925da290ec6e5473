// Part of CudaOps: SwiGLU, the squared ReLU, and the cap of logits.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/relu_squared.cuh"
#include "llmc/device/cuda/soft_cap.cuh"
#include "llmc/device/cuda/swiglu.cuh"
#include "llmc/device/operands.h"

namespace llmc::cuda {

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
