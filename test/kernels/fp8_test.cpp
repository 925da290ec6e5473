// Operands of products in 8 bits, compared with the CPU device, which rounds by the formats' definition and keeps the
// numbers as bf16.
#include "llmc/device/cuda/fp8.cuh"

#include <bit>
#include <cmath>
#include <cstring>

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::Fp8;

bf16 bf16_of(std::int64_t bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    return std::bit_cast<bf16>(half);
}

template <Fp8 format>
float number_of(std::uint8_t byte) {
    const __half_raw half = __nv_cvt_fp8_to_halfraw(byte, format == Fp8::e4m3 ? __NV_E4M3 : __NV_E5M2);
    return llmc::cuda::to_float(fp16(half));
}

// Every bf16, with scales from the least to the greatest.
template <Fp8 format>
void test_quantise() {
    constexpr std::int64_t rows = 256, columns = 256;
    Array<bf16> x(rows * columns), expected(rows * columns);
    for (std::int64_t i = 0; i < x.size(); ++i) x[i] = bf16_of(i);
    Array<std::uint8_t> plain(x.size()), both(x.size()), transposed(x.size());
    Array<float> amax(1), inverse(1), inverse_of_both(1);
    const LaunchContext on = launch_contexts().front();
    for (const float greatest : {1.0F, 448.0F, 450.0F, 0.0F, 3e-39F, 0x1p-110F, 0x1.8p120F, INFINITY, NAN}) {
        amax[0] = greatest;
        llmc::cuda::quantise<format>(on, plain.data(), nullptr, inverse.data(), x.data(), amax.data(), rows,
                                     columns);
        llmc::cuda::quantise<format>(on, both.data(), transposed.data(), inverse_of_both.data(), x.data(),
                                     amax.data(), rows, columns);
        synchronize();
        cpu().run(
            llmc::Quantise{tensor(expected, {x.size()}), tensor(x, {x.size()}), tensor(amax, {1}), format});
        ASSERT_EQ(inverse[0], 1 / llmc::fp8_scale(format, greatest));
        ASSERT_EQ(inverse_of_both[0], inverse[0]);
        for (std::int64_t i = 0; i < x.size(); ++i) {
            ASSERT_EQ(both[i], plain[i]) << i;
            ASSERT_EQ(transposed[i % columns * rows + i / columns], plain[i]) << i;
            const float got = number_of<format>(plain[i]) * inverse[0];
            const float wanted = llmc::cuda::to_float(expected[i]);
            ASSERT_TRUE(got == wanted || (std::isnan(got) && std::isnan(wanted)))
                << i << " with amax " << greatest << ": " << got << ", on the CPU " << wanted;
        }
    }
}
TEST(KernelsFp8, QuantiseToE4m3) { test_quantise<Fp8::e4m3>(); }
TEST(KernelsFp8, QuantiseToE5m2) { test_quantise<Fp8::e5m2>(); }

// Tiles that a tensor does not fill, and none but the transposed copy.
TEST(KernelsFp8, Shapes) {
    Draw draw(seed());
    using Sizes = std::vector<std::int64_t>;
    for (const auto& on : launch_contexts()) {
        for (const Sizes& s : std::vector<Sizes>{{16, 16}, {16, 208}, {144, 32}, {80, 80}}) {
            Array<bf16> x(s[0] * s[1]);
            draw.normal(x, 1);
            Array<std::uint8_t> plain(x.size()), transposed(x.size());
            Array<float> amax(1), inverse(1);
            amax[0] = 4;
            llmc::cuda::quantise<Fp8::e5m2>(on, nullptr, transposed.data(), inverse.data(), x.data(),
                                            amax.data(), s[0], s[1]);
            llmc::cuda::quantise<Fp8::e5m2>(on, plain.data(), nullptr, inverse.data(), x.data(), amax.data(),
                                            s[0], s[1]);
            synchronize();
            for (std::int64_t i = 0; i < x.size(); ++i)
                ASSERT_EQ(transposed[i % s[1] * s[0] + i / s[1]], plain[i]) << i << " of " << s[0];
        }
    }
}

TEST(KernelsFp8, Amax) {
    Draw draw(seed());
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t elements : shapes<std::int64_t>({1, 37, 4096, 4099, 40003}, {2203, 600})) {
            for (const std::int64_t offset : {0, 1}) {
                for (const bf16 last : {bf16_of(0xc200), bf16_of(0xff80), bf16_of(0x7fc1)}) {
                    Array<bf16> x(elements + offset);
                    draw.normal(x, 1);
                    x[offset + draw.below(elements)] = last;
                    Array<float> out(1), expected(1);
                    for (const float before : {0.0F, 1.0F, 100.0F}) {
                        out[0] = expected[0] = before;
                        llmc::cuda::amax(on, out.data(), x.data() + offset, elements);
                        synchronize();
                        cpu().run(
                            llmc::Amax{tensor(expected, {1}), tensor(x, {x.size()}).flat(offset, elements)});
                        ASSERT_EQ(std::bit_cast<std::uint32_t>(out[0]),
                                  std::bit_cast<std::uint32_t>(expected[0]))
                            << elements << " elements from " << offset;
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace kernel_test
