// The greatest magnitude of a tensor, and numbers rounded to 8 bits for products.
#include "llmc/device/fp8.h"

#include <array>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"

namespace llmc::cpu {

// The bits of magnitudes are ordered like the magnitudes, and those of NaN come last.
void CpuOps::compute(const Amax& op, std::int64_t n) {
    constexpr std::int64_t parts = 64;
    std::array<std::uint32_t, parts> most{};
    const std::int64_t size = divide_up(n, parts);
    parallel_for(threads_for(n, threads_), parts, [=, &most, all = op.x.as<bfloat16>()](std::int64_t part) {
        const std::int64_t begin = std::min(part * size, n), end = std::min(begin + size, n);
        std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (std::int64_t i = begin; i < end; ++i)
            largest = std::max(largest, std::uint32_t{all[i].bits} & 0x7fffU);
        most[static_cast<std::size_t>(part)] = largest;
    });
    const std::uint32_t largest = std::ranges::max(most) << 16;
    float& greatest = *op.out.as<float>();
    greatest = std::bit_cast<float>(std::max(std::bit_cast<std::uint32_t>(greatest), largest));
}

void CpuOps::compute(const Quantise& op, std::int64_t n) {
    const float scale = fp8_scale(op.format, *op.amax.as<float>());
    const auto round = [&]<Fp8 to>() {
        parallel_pieces(threads_, n,
                        [=, from = op.x.as<bfloat16>(), rounded = op.out.as<bfloat16>()](std::int64_t begin,
                                                                                         std::int64_t end) {
#pragma omp simd
                            for (std::int64_t i = begin; i < end; ++i)
                                rounded[i] = quantised<to>(from[i], scale, 1 / scale);
                        });
    };
    op.format == Fp8::e4m3 ? round.operator()<Fp8::e4m3>() : round.operator()<Fp8::e5m2>();
}

}  // namespace llmc::cpu
