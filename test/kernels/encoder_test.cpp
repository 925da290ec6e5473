// The embedding's kernels against the CPU device.
#include "llmc/device/cuda/encoder.cuh"

#include <algorithm>

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

// Tokens are drawn from the first `tokens` rows of the vocabulary, so that some occur often: in the last shape one, in
// more tiles than a warp looks at together.
struct Shape {
    int batch;
    std::int64_t sequence;
    int channels, vocabulary, tokens;
};
const std::vector<Shape> encoder_shapes = {
    {6, 24, 24, 131, 6}, {1, 1, 8, 1, 1},       {2, 33, 264, 5003, 5003}, {5, 100, 40, 300, 300},
    {9, 32, 72, 640, 1}, {3, 80, 128, 1000, 4}, {2, 1024, 16, 3, 1}};

template <class X>
class Encoder : public Kernels<X> {};
TYPED_TEST_SUITE(Encoder, Dtypes);

TYPED_TEST(Encoder, Forward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [B, T, C, V, among] : shapes(encoder_shapes)) {
            Draw draw(seed());
            Array<X> wte(std::int64_t{V} * C), wpe((T + 2) * C), out(B * T * C), expected(B * T * C);
            Array<std::int32_t> tokens(B * T);
            draw.normal(wte, 0.1);
            draw.normal(wpe, 0.1);
            draw.below(tokens, among);
            llmc::cuda::encoder_forward(on, out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C);
            synchronize();
            cpu().encoder_forward(tensor(expected, {B, T, C}), tensor(tokens, {B, T}), tensor(wte, {V, C}),
                                  tensor(wpe, {T + 2, C}));
            // One addition in fp32, and one rounding to X.
            EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.bytes()), 0);
        }
    }
}

TYPED_TEST(Encoder, Backward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [B, T, C, V, among] : shapes(encoder_shapes)) {
            Draw draw(seed());
            const std::int64_t rows = B * T, in_wte = std::int64_t{V} * C, in_wpe = (T + 2) * C;
            Array<X> dout(rows * C);
            Array<std::int32_t> tokens(rows);
            Array<float> dwte_before(in_wte), dwpe_before(in_wpe), expected_dwte(in_wte),
                expected_dwpe(in_wpe);
            draw.normal(dout, 1);
            draw.below(tokens, among);
            draw.normal(dwte_before, 1);
            draw.normal(dwpe_before, 1);

            Array<std::byte> workspace(
                static_cast<std::int64_t>(llmc::cuda::encoder_backward_workspace_bytes(rows, C)));
            Array<float> dwte(in_wte), dwpe(in_wpe);
            const auto run = [&, B = B, T = T, C = C, V = V] {
                dwte.copy_from(dwte_before);
                dwpe.copy_from(dwpe_before);
                workspace.clear();
                llmc::cuda::encoder_backward(on, dwte.data(), dwpe.data(), dout.data(), tokens.data(), B, T,
                                             C, V, workspace.data());
                synchronize();
            };
            run();

            expected_dwte.copy_from(dwte_before);
            expected_dwpe.copy_from(dwpe_before);
            cpu().encoder_backward(tensor(expected_dwte, {V, C}), tensor(expected_dwpe, {T + 2, C}),
                                   tensor(dout, {B, T, C}), tensor(tokens, {B, T}));
            // Each device makes as many additions as a token or position has rows, of terms below 6.
            std::vector<double> count(static_cast<std::size_t>(V));
            for (std::int64_t row = 0; row < rows; ++row) ++count[static_cast<std::size_t>(tokens[row])];
            const auto bound = [](double n) { return 2 * n * lab::unit_roundoff<float> * (n + 1) * 6; };
            Comparison comparison;
            for (std::int64_t i = 0; i < in_wte; ++i) {
                const double n = count[static_cast<std::size_t>(i / C)];
                if (n == 0) {
                    comparison.see_equal("dwte", i, dwte[i], dwte_before[i]);
                } else {
                    comparison.see("dwte", i, dwte[i], expected_dwte[i], bound(n));
                }
            }
            for (std::int64_t i = 0; i < in_wpe; ++i) {
                comparison.see("dwpe", i, dwpe[i], expected_dwpe[i], bound(i < T * C ? B : 1e-9));
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();

            if (on.chip.architecture != launch_contexts().front().chip.architecture) continue;
            Array<float> first_dwte(in_wte), first_dwpe(in_wpe);
            first_dwte.copy_from(dwte);
            first_dwpe.copy_from(dwpe);
            run();
            EXPECT_EQ(std::memcmp(dwte.data(), first_dwte.data(), dwte.bytes()), 0) << "from run to run";
            EXPECT_EQ(std::memcmp(dwpe.data(), first_dwpe.data(), dwpe.bytes()), 0) << "from run to run";
        }
    }
}

// The order of the rows is that of their tokens, class by class, and within a token theirs.
TEST(EncoderOrder, IsStable) {
    struct OrderShape {
        int rows, vocabulary;
    };
    auto contexts = launch_contexts();
    contexts.push_back(contexts.front());
    contexts.back().chip.shared_bytes_per_block = 4 << 10;  // of a large vocabulary, the counts of one warp
    // Some with several warps a block, some with one.
    for (const auto& on : contexts) {
        // In the last, the counts of 16 warps take 48 KB of shared memory, and leave nothing for the kernel's own.
        for (const auto& [rows, V] :
             shapes<OrderShape>({{400, 37}, {1, 1}, {700, 50257}, {1100, 150}, {300, 3}, {1921, 98304}})) {
            Draw draw(seed());
            Array<std::int32_t> tokens(rows), order(rows);
            draw.below(tokens, V);
            llmc::cuda::order_rows(on, order.data(), tokens.data(), rows, V);
            synchronize();
            std::vector<std::int32_t> expected(static_cast<std::size_t>(rows));
            for (int row = 0; row < rows; ++row) expected[static_cast<std::size_t>(row)] = row;
            const auto place = [&, classes = 1 << llmc::cuda::token_class_bits(V)](std::int32_t row) {
                return std::pair(tokens[row] % classes, tokens[row] / classes);
            };
            std::stable_sort(expected.begin(), expected.end(),
                             [&](auto a, auto b) { return place(a) < place(b); });
            EXPECT_TRUE(std::equal(expected.begin(), expected.end(), order.data())) << rows << " " << V;
        }
    }
}

}  // namespace
}  // namespace kernel_test
