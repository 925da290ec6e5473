// Casts, copies, fills, addition of tensors, the test for NaN and infinity, and GELU.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/operands.h"
#include "llmc/device/stochastic_rounding.h"

namespace llmc::cpu {

void CpuOps::cast(const Tensor& out, const Tensor& in) {
    check_elements(out, out.dtype, in.elements(), "out");
    check_dtype(in, in.dtype, "in");
    with_dtype(out.dtype, [&](auto to_element) {
        with_dtype(in.dtype, [&](auto from_element) {
            using To = decltype(to_element);
            using From = decltype(from_element);
            parallel_pieces(threads_, in.elements(),
                            [y = out.as<To>(), x = in.as<From>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                                for (std::int64_t i = begin; i < end; ++i) {
                                    y[i] = from_float<To>(to_float(x[i]));
                                }
                            });
        });
    });
}

void CpuOps::copy(const Tensor& out, const Tensor& in) {
    check_dtype(out, out.dtype, "out");
    check_elements(in, out.dtype, out.elements(), "in");
    const auto bytes = static_cast<std::int64_t>(out.bytes());
    constexpr std::int64_t piece = 64 << 10;
    parallel_for(threads_, divide_up(bytes, piece), [=, to = out.data, from = in.data](std::int64_t i) {
        const std::int64_t begin = i * piece;
        std::memcpy(to + begin, from + begin, static_cast<std::size_t>(std::min(piece, bytes - begin)));
    });
}

void CpuOps::fill(const Tensor& out, float value) {
    check_dtype(out, out.dtype, "out");
    const auto fill_as = [&]<class T>(T typed_value) {
        parallel_pieces(threads_, out.elements(), [=, y = out.as<T>()](std::int64_t begin, std::int64_t end) {
            std::fill(y + begin, y + end, typed_value);
        });
    };
    switch (out.dtype) {
        case DType::fp32:
            return fill_as(value);
        case DType::bf16:
            return fill_as(to_bfloat16(value));
        case DType::fp16:
            return fill_as(to_float16(value));
        case DType::fp64:
            return fill_as(double{value});
        case DType::int32:
            return fill_as(static_cast<std::int32_t>(value));
        case DType::uint8:
            return fill_as(static_cast<std::uint8_t>(value));
    }
}

void CpuOps::add(const Tensor& out, const Tensor& a, const Tensor& b) {
    check_dtype(out, out.dtype, "out");
    check_elements(a, out.dtype, out.elements(), "a");
    check_elements(b, out.dtype, out.elements(), "b");
    with_dtype(out.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_pieces(
            threads_, out.elements(),
            [y = out.as<X>(), u = a.as<X>(), v = b.as<X>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                for (std::int64_t i = begin; i < end; ++i) {
                    y[i] = from_float<X>(to_float(u[i]) + to_float(v[i]));
                }
            });
    });
}

void CpuOps::accumulate(const Tensor& out, const Tensor& in, const StochasticRounding& rounding,
                        std::int64_t count) {
    check_accumulate(out, in, rounding);
    constexpr std::int64_t most = 1024;
    const auto add = [&](const auto* x) {
        parallel_pieces(threads_, out.elements(), [&](std::int64_t begin, std::int64_t end) {
            auto* const y = out.as<bfloat16>();
            std::array<float, most> sums;
            for (std::int64_t first = begin; first < end; first += most) {
                const std::int64_t n = std::min(most, end - first);
#pragma omp simd
                for (std::int64_t i = 0; i < n; ++i)
                    sums[static_cast<std::size_t>(i)] = to_float(y[first + i]) + to_float(x[first + i]);
                round_stochastically(y, sums.data(), first, first + n, rounding, count, Rounded::gradient);
            }
        });
    };
    in.dtype == DType::bf16 ? add(in.as<bfloat16>()) : add(in.as<float>());
}

void CpuOps::all_finite(const Tensor& flag, const Tensor& x) {
    check_elements(flag, DType::int32, 1, "flag");
    check_dtype(x, x.dtype, "x");
    with_dtype(x.dtype, [&](auto element) {
        using X = decltype(element);
        // The exponent bits of infinities and NaNs are all ones.
        constexpr std::uint32_t exponent = 0x7f800000U;
        constexpr std::int64_t parts = 64;
        std::array<std::uint32_t, parts> greatest{};
        const std::int64_t n = x.elements();
        const std::int64_t size = divide_up(n, parts);
        parallel_for(threads_for(n, threads_), parts, [=, &greatest, all = x.as<X>()](std::int64_t part) {
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
        *flag.as<std::int32_t>() = finite ? 1 : 0;
    });
}

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
