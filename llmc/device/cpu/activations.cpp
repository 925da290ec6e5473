// SwiGLU, the squared ReLU, and the cap of logits.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/activation_math.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"

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

void CpuOps::compute(const SwigluForward& op, const RowSizes& sizes) {
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_row_pieces(threads_, sizes,
                            [y = op.out.as<X>(), x = op.in.as<X>(), F = sizes.channels](
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

void CpuOps::compute(const SwigluBackward& op, const RowSizes& sizes) {
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_row_pieces(threads_, sizes,
                            [dx = op.din.as<X>(), dy = op.dout.as<X>(), x = op.in.as<X>(),
                             F = sizes.channels](std::int64_t row, std::int64_t begin, std::int64_t end) {
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

void CpuOps::compute(const ReluSquaredForward& op, std::int64_t n) {
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, n,
                        [y = op.out.as<X>(), x = op.in.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i) {
                                const float r = positive_part(to_float(x[i]));
                                y[i] = from_float<X>(r * r);
                            }
                        });
    });
}

void CpuOps::compute(const ReluSquaredBackward& op, std::int64_t n) {
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, n,
                        [dx = op.din.as<X>(), dy = op.dout.as<X>(), x = op.in.as<X>()](std::int64_t begin,
                                                                                       std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i) {
                                dx[i] = from_float<X>(2.0F * positive_part(to_float(x[i])) * to_float(dy[i]));
                            }
                        });
    });
}

void CpuOps::compute(const llmc::SoftCap& op, std::int64_t n) {
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, n,
                        [y = op.out.as<X>(), x = op.in.as<X>(), capped = SoftCap(op.cap)](std::int64_t begin,
                                                                                          std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i) {
                                y[i] = from_float<X>(capped(to_float(x[i])).value);
                            }
                        });
    });
}

}  // namespace llmc::cpu
