// The kernels of the gradient norm, and sums in fp64, compared with the CPU device.
#include "llmc/device/cuda/global_norm.cuh"

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

constexpr std::int64_t elements = llmc::norm_block_elements;

template <class X>
class GlobalNormOf : public Kernels<X> {};
TYPED_TEST_SUITE(GlobalNormOf, Fp32AndBf16);

TYPED_TEST(GlobalNormOf, SquaresOfBlocks) {
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t blocks : shapes<std::int64_t>({3, 1, 8, 29})) {
            Draw draw(seed());
            Array<TypeParam> x(blocks * elements);
            Array<float> partials(blocks), again(blocks), expected(blocks);
            draw.normal(x, 1);
            llmc::cuda::global_norm_squared(on, partials.data(), x.data(), x.size());
            llmc::cuda::global_norm_squared(on, again.data(), x.data(), x.size(), 32);
            synchronize();
            // The number of threads does not change the bits either.
            EXPECT_EQ(std::memcmp(partials.data(), again.data(), partials.bytes()), 0);
            cpu().run(llmc::GlobalNormSquared{tensor(expected, {blocks}), tensor(x, {blocks * elements})});
            Comparison comparison;
            for (std::int64_t block = 0; block < blocks; ++block) {
                // Both devices round each square, and each addition of positive terms.
                comparison.see("partials", block, partials[block], expected[block],
                               2 * (elements + 1) * lab::unit_roundoff<float> * expected[block]);
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TEST(GlobalNorm, SumInFp64) {
    for (const auto& on : launch_contexts()) {
        // One element, one short part, parts of unequal size, and more elements than 256 parts of 1024.
        for (const std::int64_t n : shapes<std::int64_t>({1500, 1, 1024, 262145})) {
            Draw draw(seed());
            Array<float> x(n);
            Array<double> out(1), again(1), expected(1);
            Array<std::byte> workspace(static_cast<std::int64_t>(llmc::cuda::sum_workspace_bytes()));
            draw.normal(x, 1, 0.5);
            out[0] = again[0] = expected[0] = 1e5;
            llmc::cuda::sum(on, out.data(), x.data(), n, workspace.data());
            workspace.clear();
            llmc::cuda::sum(on, again.data(), x.data(), n, workspace.data());
            synchronize();
            EXPECT_EQ(out[0], again[0]);
            cpu().run(llmc::Sum{tensor(expected, {1}), tensor(x, {n})});
            double magnitude = 1e5;
            for (std::int64_t i = 0; i < n; ++i) magnitude += std::fabs(x[i]);
            // Both devices do n additions in fp64, u = 2^-53.
            EXPECT_NEAR(out[0], expected[0], 2 * static_cast<double>(n) * 0x1p-53 * magnitude);
        }
    }
}

// The order depends only on n, not on the address of the first element.
TEST(GlobalNorm, SumIsTheSameAtAllAddresses) {
    const auto on = launch_contexts().front();
    for (const std::int64_t n : shapes<std::int64_t>({3001, 2})) {
        Draw draw(seed());
        Array<float> x(n);
        Array<std::byte> workspace(static_cast<std::int64_t>(llmc::cuda::sum_workspace_bytes()));
        draw.normal(x, 1);
        std::vector<double> sums;
        for (std::int64_t first = 0; first < 4; ++first) {
            Array<float> moved(first + n);
            std::memcpy(moved.data() + first, x.data(), x.bytes());
            Array<double> out(1);
            out[0] = 0;
            llmc::cuda::sum(on, out.data(), moved.data() + first, n, workspace.data());
            synchronize();
            sums.push_back(out[0]);
        }
        for (const double other : sums) EXPECT_EQ(other, sums.front());
    }
}

// The sum is the same on every chip.
TEST(GlobalNorm, SumIsTheSameOnAllChips) {
    constexpr std::int64_t n = 5000;
    Draw draw(seed());
    Array<float> x(n);
    Array<std::byte> workspace(static_cast<std::int64_t>(llmc::cuda::sum_workspace_bytes()));
    draw.normal(x, 1);
    std::vector<double> sums;
    for (auto on : launch_contexts()) {
        for (const int multiprocessors : {on.chip.multiprocessors, 1}) {
            on.chip.multiprocessors = multiprocessors;
            Array<double> out(1);
            out[0] = 0;
            llmc::cuda::sum(on, out.data(), x.data(), n, workspace.data());
            synchronize();
            sums.push_back(out[0]);
        }
    }
    for (const double other : sums) EXPECT_EQ(other, sums.front());
}

}  // namespace
}  // namespace kernel_test
