// The greatest magnitude of a tensor, and numbers rounded to 8 bits for products.
#include "llmc/device/fp8.h"

#include <array>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/operands.h"

namespace llmc::cpu {

// The bits of magnitudes are ordered like the magnitudes, and those of NaN come last.
void CpuOps::amax(const Tensor& out, const Tensor& x) {
    check_elements(out, DType::fp32, 1, "out");
    check_dtype(x, DType::bf16, "x");
    constexpr std::int64_t parts = 64;
    std::array<std::uint32_t, parts> most{};
    const std::int64_t n = x.elements(), size = divide_up(n, parts);
    parallel_for(threads_for(n, threads_), parts, [=, &most, all = x.as<bfloat16>()](std::int64_t part) {
        const std::int64_t begin = std::min(part * size, n), end = std::min(begin + size, n);
        std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (std::int64_t i = begin; i < end; ++i)
            largest = std::max(largest, std::uint32_t{all[i].bits} & 0x7fffU);
        most[static_cast<std::size_t>(part)] = largest;
    });
    const std::uint32_t largest = std::ranges::max(most) << 16;
    float& greatest = *out.as<float>();
    greatest = std::bit_cast<float>(std::max(std::bit_cast<std::uint32_t>(greatest), largest));
}

void CpuOps::quantise(const Tensor& out, const Tensor& x, const Tensor& amax, Fp8 format) {
    check_dtype(out, DType::bf16, "out");
    check_elements(x, DType::bf16, out.elements(), "x");
    check_elements(amax, DType::fp32, 1, "amax");
    const float scale = fp8_scale(format, *amax.as<float>());
    const auto round = [&]<Fp8 to>() {
        parallel_pieces(
            threads_, out.elements(),
            [=, from = x.as<bfloat16>(), rounded = out.as<bfloat16>()](std::int64_t begin, std::int64_t end) {
#pragma omp simd
                for (std::int64_t i = begin; i < end; ++i)
                    rounded[i] = quantised<to>(from[i], scale, 1 / scale);
            });
    };
    format == Fp8::e4m3 ? round.operator()<Fp8::e4m3>() : round.operator()<Fp8::e5m2>();
}

}  // namespace llmc::cpu
