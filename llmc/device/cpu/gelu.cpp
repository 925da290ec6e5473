// GELU by itself; as part of a matrix product it is in matmul.cpp.
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/operands.h"

namespace llmc::cpu {

void CpuOps::gelu_forward(const Tensor& out, const Tensor& in) {
    check_elements(out, in.dtype, in.elements(), "out");
    with_dtype(in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, in.elements(),
                        [y = out.as<X>(), x = in.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i) {
                                y[i] = from_float<X>(gelu(to_float(x[i])));
                            }
                        });
    });
}

void CpuOps::gelu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) {
    check_elements(din, in.dtype, in.elements(), "din");
    check_elements(dout, in.dtype, in.elements(), "dout");
    with_dtype(in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(
            threads_, in.elements(),
            [dx = din.as<X>(), dy = dout.as<X>(), x = in.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                for (std::int64_t i = begin; i < end; ++i) {
                    dx[i] = from_float<X>(to_float(dy[i]) * gelu_derivative(to_float(x[i])));
                }
            });
    });
}

}  // namespace llmc::cpu
