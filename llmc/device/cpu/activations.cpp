// SwiGLU, the squared ReLU, and the cap of logits.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/activation_math.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/operands.h"

namespace llmc::cpu {

namespace {

// Divides (rows, F) among threads in pieces that may cross rows. Calls f(row, begin, end) for elements
// begin ... end-1 of one row.
template <class F>
void parallel_row_pieces(int threads, const RowSizes& sizes, const F& f) {
    parallel_pieces(threads, sizes.rows * sizes.channels,
                    [&f, width = sizes.channels](std::int64_t begin, std::int64_t end) {
                        while (begin < end) {
                            const std::int64_t row = begin / width;
                            const std::int64_t row_end = std::min((row + 1) * width, end);
                            f(row, begin - row * width, row_end - row * width);
                            begin = row_end;
                        }
                    });
}

}  // namespace

void CpuOps::swiglu_forward(const Tensor& out, const Tensor& in) {
    const RowSizes sizes = swiglu_forward_sizes(out, in);
    with_dtype(in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_row_pieces(threads_, sizes,
                            [y = out.as<X>(), x = in.as<X>(), F = sizes.channels](
                                std::int64_t row, std::int64_t begin, std::int64_t end) {
                                const X *a = x + row * 2 * F, *b = a + F;
                                X* const to = y + row * F;
#pragma omp simd
                                for (std::int64_t i = begin; i < end; ++i) {
                                    to[i] = from_float<X>(swiglu(to_float(a[i]), to_float(b[i])));
                                }
                            });
    });
}

void CpuOps::swiglu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) {
    const RowSizes sizes = swiglu_backward_sizes(din, dout, in);
    with_dtype(in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_row_pieces(threads_, sizes,
                            [dx = din.as<X>(), dy = dout.as<X>(), x = in.as<X>(), F = sizes.channels](
                                std::int64_t row, std::int64_t begin, std::int64_t end) {
                                const X *a = x + row * 2 * F, *b = a + F, *from = dy + row * F;
                                X *da = dx + row * 2 * F, *db = da + F;
#pragma omp simd
                                for (std::int64_t i = begin; i < end; ++i) {
                                    const SwigluGradient g =
                                        swiglu_gradient(to_float(from[i]), to_float(a[i]), to_float(b[i]));
                                    da[i] = from_float<X>(g.da);
                                    db[i] = from_float<X>(g.db);
                                }
                            });
    });
}

void CpuOps::relu_squared_forward(const Tensor& out, const Tensor& in) {
    check_elements(out, in.dtype, in.elements(), "out");
    with_dtype(in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, in.elements(),
                        [y = out.as<X>(), x = in.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i) {
                                const float r = positive_part(to_float(x[i]));
                                y[i] = from_float<X>(r * r);
                            }
                        });
    });
}

void CpuOps::relu_squared_backward(const Tensor& din, const Tensor& dout, const Tensor& in) {
    check_elements(din, in.dtype, in.elements(), "din");
    check_elements(dout, in.dtype, in.elements(), "dout");
    with_dtype(in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(
            threads_, in.elements(),
            [dx = din.as<X>(), dy = dout.as<X>(), x = in.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                for (std::int64_t i = begin; i < end; ++i) {
                    dx[i] = from_float<X>(2.0F * positive_part(to_float(x[i])) * to_float(dy[i]));
                }
            });
    });
}

void CpuOps::soft_cap(const Tensor& out, const Tensor& in, float cap) {
    check_soft_cap(out, in, cap);
    with_dtype(in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(
            threads_, in.elements(),
            [y = out.as<X>(), x = in.as<X>(), capped = SoftCap(cap)](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                for (std::int64_t i = begin; i < end; ++i) {
                    y[i] = from_float<X>(capped(to_float(x[i])).value);
                }
            });
    });
}

}  // namespace llmc::cpu
