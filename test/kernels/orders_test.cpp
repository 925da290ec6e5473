// Orders that the contracts promise and that no comparison with exact results shows: sums in a fixed order, tokens in
// a stable one, and fused norms with the bits of two calls. (test/python/test_ops.py compares all results.)
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "llmc/device/cuda/encoder.cuh"
#include "llmc/device/cuda/global_norm.cuh"
#include "llmc/device/cuda/norm_forward.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::TableRows;

double sum_of(const LaunchContext& on, const float* x, std::int64_t n) {
    Array<double> out(1);
    Array<std::byte> workspace(static_cast<std::int64_t>(llmc::cuda::sum_workspace_bytes()));
    out[0] = 0;
    llmc::cuda::sum(on, out.data(), x, n, workspace.data());
    synchronize();
    return out[0];
}

// The order depends only on n: not on the address of the first element, nor on the chip.
TEST(Orders, OfASumAreTheSameAtAllAddressesAndOnAllChips) {
    for (const std::int64_t n : shapes<std::int64_t>({3001, 2, 5000})) {
        Draw draw(seed());
        Array<float> x(n);
        draw.normal(x, 1);
        const double wanted = sum_of(launch_contexts().front(), x.data(), n);
        for (std::int64_t first = 1; first < 4; ++first) {
            Array<float> moved(first + n);
            std::memcpy(moved.data() + first, x.data(), x.bytes());
            EXPECT_EQ(sum_of(launch_contexts().front(), moved.data() + first, n), wanted);
        }
        for (LaunchContext on : launch_contexts()) {
            EXPECT_EQ(sum_of(on, x.data(), n), wanted);
            on.chip.multiprocessors = 1;
            EXPECT_EQ(sum_of(on, x.data(), n), wanted);
        }
    }
}

// Nor on the number of threads.
TEST(Orders, OfSquaresAreThoseOfOneWarp) {
    constexpr std::int64_t blocks = 29;
    Draw draw(seed());
    Array<float> x(blocks * 1024), partials(blocks), again(blocks);
    draw.normal(x, 1);
    const LaunchContext on = launch_contexts().front();
    llmc::cuda::global_norm_squared(on, partials.data(), x.data(), x.size());
    llmc::cuda::global_norm_squared(on, again.data(), x.data(), x.size(), 32);
    synchronize();
    EXPECT_EQ(std::memcmp(partials.data(), again.data(), partials.bytes()), 0);
}

// Rows are sorted by token, class by class; rows of the same token keep their order. Tokens outside the table
// have no place.
TEST(Orders, OfTokensIsStable) {
    struct OrderShape {
        int rows, vocabulary;
    };
    // Only the chip's shared memory makes a difference.
    std::vector<LaunchContext> contexts(2, launch_contexts().front());
    contexts.back().chip.shared_bytes_per_block = 4 << 10;  // for a large vocabulary, the counts of one warp
    // Some shapes have several warps per block, some have one.
    for (const auto& on : contexts) {
        // In the last shape the counts of 16 warps take 48 KB of shared memory, and leave none for the
        // kernel's own arrays.
        for (const auto& [rows, V] :
             shapes<OrderShape>({{400, 37}, {1, 1}, {700, 50257}, {1100, 150}, {300, 3}, {1921, 98304}})) {
            Draw draw(seed());
            Array<std::int32_t> tokens(rows), order(rows);
            draw.below(tokens, V);
            std::vector<TableRows> all = {{0, V}};
            if (V < 1000) all.insert(all.end(), {{V / 3, V - V / 3}, {V, 1}});
            for (const TableRows& table : all) {
                for (int i = 0; i < rows; ++i) order[i] = -2;
                llmc::cuda::order_rows(on, order.data(), tokens.data(), table, rows);
                synchronize();
                std::vector<std::int32_t> expected;
                for (int row = 0; row < rows; ++row) {
                    if (tokens[row] >= table.first) expected.push_back(row);
                }
                const auto place = [&](std::int32_t row) {
                    const int classes = 1 << llmc::cuda::token_class_bits(table.count);
                    const auto token = tokens[row] - table.first;
                    return std::pair(token % classes, token / classes);
                };
                std::stable_sort(expected.begin(), expected.end(),
                                 [&](auto a, auto b) { return place(a) < place(b); });
                expected.resize(static_cast<std::size_t>(rows), -1);
                EXPECT_TRUE(std::equal(expected.begin(), expected.end(), order.data())) << rows << " " << V;
            }
        }
    }
}

// Norms of sums, which a backward pass computes anew from the stored sum.
template <class X>
class FusedNorms : public Kernels<X> {};
TYPED_TEST_SUITE(FusedNorms, Dtypes);

TYPED_TEST(FusedNorms, HaveTheBitsOfTheNormOfTheRoundedSum) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    struct Shape {
        std::int64_t rows;
        int channels;
    };
    for (const auto& [rows, channels] : shapes<Shape>({{7, 264}, {33, 384}, {5, 12288}}, {{34, 8}})) {
        Draw draw(seed());
        const std::int64_t n = rows * channels;
        Array<X> in1(n), in2(n), gamma(channels), residual(n), fused(n), alone(n);
        Array<float> mean(rows), rstd(rows), mean_alone(rows), rstd_alone(rows);
        draw.normal(in1, 1, 0.5);
        draw.normal(in2, 0.5);
        draw.normal(gamma, 0.5, 1);
        const auto norm = [&]<bool centred>() {
            const X* const none = nullptr;
            llmc::cuda::norm_forward<centred, X>(on, residual.data(), fused.data(), mean.data(), rstd.data(),
                                                 in1.data(), in2.data(), gamma.data(), none, 1e-5f, rows,
                                                 channels);
            llmc::cuda::norm_forward<centred, X>(on, nullptr, alone.data(), mean_alone.data(),
                                                 rstd_alone.data(), residual.data(), none, gamma.data(), none,
                                                 1e-5f, rows, channels);
            synchronize();
            EXPECT_EQ(std::memcmp(fused.data(), alone.data(), fused.bytes()), 0) << channels;
            EXPECT_EQ(std::memcmp(rstd.data(), rstd_alone.data(), rstd.bytes()), 0) << channels;
            EXPECT_EQ(std::memcmp(mean.data(), mean_alone.data(), mean.bytes()), 0) << channels;
        };
        norm.template operator()<true>();
        norm.template operator()<false>();
    }
}

}  // namespace
}  // namespace kernel_test
