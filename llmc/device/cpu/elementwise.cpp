// Casts, copies, fills, addition of tensors, the test for NaN and infinity, and GELU.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/nf4.h"
#include "llmc/device/stochastic_rounding.h"
#include "llmc/optim/muon.h"

namespace llmc::cpu {

void CpuOps::compute(const Cast& op, std::int64_t n) {
    with_dtype(op.out.dtype, [&](auto to_element) {
        with_dtype(op.in.dtype, [&](auto from_element) {
            using To = decltype(to_element);
            using From = decltype(from_element);
            parallel_pieces(
                threads_, n,
                [y = op.out.as<To>(), x = op.in.as<From>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                    for (std::int64_t i = begin; i < end; ++i) {
                        y[i] = from_float<To>(to_float(x[i]));
                    }
                });
        });
    });
}

void CpuOps::compute(const Copy& op, std::int64_t) {
    const auto bytes = static_cast<std::int64_t>(op.out.bytes());
    constexpr std::int64_t piece = 64 << 10;
    parallel_for(threads_, divide_up(bytes, piece), [=, to = op.out.data, from = op.in.data](std::int64_t i) {
        const std::int64_t begin = i * piece;
        std::memcpy(to + begin, from + begin, static_cast<std::size_t>(std::min(piece, bytes - begin)));
    });
}

void CpuOps::compute(const Fill& op, std::int64_t n) {
    const auto fill_as = [&]<class T>(T typed_value) {
        parallel_pieces(threads_, n, [=, y = op.out.as<T>()](std::int64_t begin, std::int64_t end) {
            std::fill(y + begin, y + end, typed_value);
        });
    };
    switch (op.out.dtype) {
        case DType::fp32:
            return fill_as(op.value);
        case DType::bf16:
            return fill_as(to_bfloat16(op.value));
        case DType::fp16:
            return fill_as(to_float16(op.value));
        case DType::fp64:
            return fill_as(double{op.value});
        case DType::int32:
            return fill_as(static_cast<std::int32_t>(op.value));
        case DType::uint8:
            return fill_as(static_cast<std::uint8_t>(op.value));
    }
}

void CpuOps::compute(const Add& op, std::int64_t n) {
    with_dtype(op.out.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(
            threads_, n,
            [y = op.out.as<X>(), u = op.a.as<X>(), v = op.b.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                for (std::int64_t i = begin; i < end; ++i) {
                    y[i] = from_float<X>(to_float(u[i]) + to_float(v[i]));
                }
            });
    });
}

void CpuOps::compute(const DequantiseNf4& op, std::int64_t n) {
    with_dtype(op.out.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_for(n, threads_), n / nf4_block,
                     [out = op.out.as<X>(), in = op.in.data](std::int64_t block) {
                         std::array<float, nf4_block> numbers{};
                         from_nf4(numbers, in + block * nf4_block_bytes);
                         for (std::size_t i = 0; i < numbers.size(); ++i)
                             out[block * nf4_block + static_cast<std::int64_t>(i)] =
                                 from_float<X>(numbers[i]);
                     });
    });
}

void CpuOps::compute(const CopyMatrix& op, std::int64_t) {
    constexpr std::int64_t tile = 32;  // its rows fit the first cache when they are transposed
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_, divide_up(op.rows, tile),
                     [=, to = op.out.as<X>(), from = op.in.as<X>()](auto of_rows) {
                         const std::int64_t begin = of_rows * tile, end = std::min(begin + tile, op.rows);
                         if (!op.transposed) {
                             for (std::int64_t i = begin; i < end; ++i)
                                 std::copy_n(from + i * op.in_stride, op.columns, to + i * op.out_stride);
                             return;
                         }
                         for (std::int64_t j = 0; j < op.columns; ++j)
                             for (std::int64_t i = begin; i < end; ++i)
                                 to[j * op.out_stride + i] = from[i * op.in_stride + j];
                     });
    });
}

void CpuOps::compute(const Combine& op, std::int64_t n) {
    const float s = op.norm_squared ? inverse_norm(*op.norm_squared.as<double>()) : 1;
    with_dtype(op.out.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, n,
                        [=, a = op.a, b = op.b, to = op.out.as<X>(), x = op.x.as<X>(),
                         y = op.y ? op.y.as<X>() : nullptr](std::int64_t begin, std::int64_t end) {
                            if (y == nullptr) {
#pragma omp simd
                                for (std::int64_t i = begin; i < end; ++i)
                                    to[i] = from_float<X>(combined(a, to_float(x[i]), b, 0, s));
                            } else {
#pragma omp simd
                                for (std::int64_t i = begin; i < end; ++i)
                                    to[i] = from_float<X>(combined(a, to_float(x[i]), b, to_float(y[i]), s));
                            }
                        });
    });
}

void CpuOps::compute(const Accumulate& op, std::int64_t n) {
    constexpr std::int64_t most = 1024;
    const auto add = [&](const auto* x) {
        parallel_pieces(threads_, n, [&](std::int64_t begin, std::int64_t end) {
            auto* const y = op.out.as<bfloat16>();
            std::array<float, most> sums;
            for (std::int64_t first = begin; first < end; first += most) {
                const std::int64_t here = std::min(most, end - first);
#pragma omp simd
                for (std::int64_t i = 0; i < here; ++i)
                    sums[static_cast<std::size_t>(i)] = to_float(y[first + i]) + to_float(x[first + i]);
                round_stochastically(y, sums.data(), first, first + here, op.rounding, op.count,
                                     Rounded::gradient);
            }
        });
    };
    op.in.dtype == DType::bf16 ? add(op.in.as<bfloat16>()) : add(op.in.as<float>());
}

void CpuOps::compute(const AllFinite& op, std::int64_t n) {
    with_dtype(op.x.dtype, [&](auto element) {
        using X = decltype(element);
        // The exponent bits of infinities and NaNs are all ones.
        constexpr std::uint32_t exponent = 0x7f800000U;
        constexpr std::int64_t parts = 64;
        std::array<std::uint32_t, parts> greatest{};

        const std::int64_t size = divide_up(n, parts);
        parallel_for(threads_for(n, threads_), parts, [=, &greatest, all = op.x.as<X>()](std::int64_t part) {
            const X* values = all + part * size;
            const std::int64_t count = std::min(size, n - part * size);
            std::uint32_t found = 0;
#pragma omp simd reduction(max : found)
            for (std::int64_t i = 0; i < count; ++i) {
                const std::uint32_t bits = std::bit_cast<std::uint32_t>(to_float(values[i])) & exponent;
                found = bits > found ? bits : found;
            }
            greatest[static_cast<std::size_t>(part)] = found;
        });
        const bool finite = *std::max_element(greatest.begin(), greatest.end()) < exponent;
        *op.flag.as<std::int32_t>() = finite ? 1 : 0;
    });
}

void CpuOps::compute(const GeluForward& op, std::int64_t n) {
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, n,
                        [y = op.out.as<X>(), x = op.in.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i) {
                                y[i] = from_float<X>(gelu(to_float(x[i])));
                            }
                        });
    });
}

void CpuOps::compute(const GeluBackward& op, std::int64_t n) {
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(threads_, n,
                        [dx = op.din.as<X>(), dy = op.dout.as<X>(), x = op.in.as<X>()](std::int64_t begin,
                                                                                       std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i) {
                                dx[i] = from_float<X>(to_float(dy[i]) * gelu_derivative(to_float(x[i])));
                            }
                        });
    });
}

}  // namespace llmc::cpu
