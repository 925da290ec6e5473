// The embedding's kernels against the CPU device.
#include "llmc/device/cuda/encoder.cuh"

#include <algorithm>

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::TableRows;

// Tokens are drawn from the first `tokens` rows of the vocabulary, so that some occur often. In the last
// shape one token fills more tiles than a warp examines at once.
struct Shape {
    int batch;
    std::int64_t sequence;
    int channels, vocabulary, tokens;
};
const std::vector<Shape> encoder_shapes = {
    {6, 24, 24, 131, 6}, {1, 1, 8, 1, 1},       {2, 33, 264, 5003, 5003}, {5, 100, 40, 300, 300},
    {9, 32, 72, 640, 1}, {3, 80, 128, 1000, 4}, {2, 1024, 16, 3, 1}};
const std::vector<Shape> encoder_shapes_for_races = {{5, 100, 24, 131, 6}};

// The whole table, and parts of it: with some of the tokens that occur, and with rows that do not occur.
std::vector<TableRows> tables(int vocabulary, int among) {
    return {{0, vocabulary}, {0, (among + 1) / 2}, {among / 2, vocabulary - among / 2}, {vocabulary, 7}};
}

template <class X>
class Encoder : public Kernels<X> {};
TYPED_TEST_SUITE(Encoder, Dtypes);

TYPED_TEST(Encoder, Forward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [B, T, C, V, among] : shapes(encoder_shapes, encoder_shapes_for_races)) {
            Draw draw(seed());
            // The smallest part has 7 rows.
            Array<X> wte(std::int64_t{V + 7} * C), wpe((T + 2) * C), out(B * T * C), expected(B * T * C);
            Array<std::int32_t> tokens(B * T);
            draw.normal(wte, 0.1);
            draw.normal(wpe, 0.1);
            draw.below(tokens, among);
            for (const TableRows& table : tables(V, among)) {
                for (const bool with_wpe : {true, false}) {
                    out.clear();
                    llmc::cuda::encoder_forward(on, out.data(), tokens.data(), wte.data(),
                                                with_wpe ? wpe.data() : nullptr, table, B, T, C);
                    synchronize();
                    cpu().run(llmc::EncoderForward{tensor(expected, {B, T, C}), tensor(tokens, {B, T}),
                                                   tensor(wte, {V + 7, C}).slice(0, table.count),
                                                   with_wpe ? tensor(wpe, {T + 2, C}) : llmc::Tensor{},
                                                   table.first});
                    // One addition in fp32, and one rounding to X.
                    EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.bytes()), 0);
                }
            }
        }
    }
}

// dwte and dwpe before and after.
template <class X>
struct Gradients {
    Gradients(const Shape& shape, Draw& draw)
        : batch(shape.batch),
          sequence(shape.sequence),
          channels(shape.channels),
          dout(batch * sequence * channels),
          tokens(batch * sequence),
          dwte_before(std::int64_t{shape.vocabulary + 7} * channels),
          dwpe_before((sequence + 2) * channels),
          dwte(dwte_before.size()),
          dwpe(dwpe_before.size()) {
        draw.normal(dout, 1);
        draw.below(tokens, shape.tokens);
        draw.normal(dwte_before, 1);
        draw.normal(dwpe_before, 1);
    }

    void run(const LaunchContext& on, TableRows table, bool with_dwpe = true) {
        // Each array has its own red zones. `order` begins with numbers that are neither rows nor -1 (no
        // row).
        Array<std::int32_t> order(batch * sequence);
        Array<float> partials(llmc::cuda::encoder_partials(batch * sequence, channels));
        for (std::int64_t i = 0; i < order.size(); ++i) order[i] = 1 << 30;
        partials.clear();
        dwte.copy_from(dwte_before);
        dwpe.copy_from(dwpe_before);
        llmc::cuda::encoder_backward(on, dwte.data(), with_dwpe ? dwpe.data() : nullptr, dout.data(),
                                     tokens.data(), table, batch, sequence, channels,
                                     {order.data(), partials.data()});
        synchronize();
    }

    void compare(TableRows table, Comparison& comparison) {
        const std::int64_t rows = batch * sequence, C = channels;
        Array<float> expected_dwte(dwte.size()), expected_dwpe(dwpe.size());
        expected_dwte.copy_from(dwte_before);
        expected_dwpe.copy_from(dwpe_before);
        cpu().run(llmc::EncoderBackward{tensor(expected_dwte, {dwte.size() / C, C}).slice(0, table.count),
                                        tensor(expected_dwpe, {sequence + 2, C}),
                                        tensor(dout, {batch, sequence, C}), tensor(tokens, {batch, sequence}),
                                        table.first});
        // The number of additions on each device is the number of rows of a token or position. Terms are
        // below 6.
        std::vector<double> count(static_cast<std::size_t>(dwte.size() / C));
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t i = tokens[row] - table.first;
            if (i >= 0 && i < table.count) ++count[static_cast<std::size_t>(i)];
        }
        const auto bound = [](double n) { return 2 * n * lab::unit_roundoff<float> * (n + 1) * 6; };
        for (std::int64_t i = 0; i < dwte.size(); ++i) {
            const double n = count[static_cast<std::size_t>(i / C)];
            if (n == 0) {
                comparison.see_equal("dwte", i, dwte[i], dwte_before[i]);
            } else {
                comparison.see("dwte", i, dwte[i], expected_dwte[i], bound(n));
            }
        }
        for (std::int64_t i = 0; i < dwpe.size(); ++i) {
            comparison.see("dwpe", i, dwpe[i], expected_dwpe[i], bound(i < sequence * C ? batch : 1e-9));
        }
    }

    int batch;
    std::int64_t sequence;
    int channels;
    Array<X> dout;
    Array<std::int32_t> tokens;
    Array<float> dwte_before, dwpe_before, dwte, dwpe;
};

TYPED_TEST(Encoder, Backward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const Shape& shape : shapes(encoder_shapes, encoder_shapes_for_races)) {
            Draw draw(seed());
            Gradients<X> gradients(shape, draw);
            for (const TableRows& table : tables(shape.vocabulary, shape.tokens)) {
                gradients.run(on, table);
                Comparison comparison;
                gradients.compare(table, comparison);
                EXPECT_TRUE(comparison.good()) << comparison.first_failure();
            }
            if (on.chip.architecture != launch_contexts().front().chip.architecture) continue;
            const TableRows table{0, shape.vocabulary};
            gradients.run(on, table);
            Array<float> first_dwte(gradients.dwte.size()), first_dwpe(gradients.dwpe.size());
            first_dwte.copy_from(gradients.dwte);
            first_dwpe.copy_from(gradients.dwpe);
            gradients.run(on, table);
            EXPECT_EQ(std::memcmp(gradients.dwte.data(), first_dwte.data(), first_dwte.bytes()), 0);
            EXPECT_EQ(std::memcmp(gradients.dwpe.data(), first_dwpe.data(), first_dwpe.bytes()), 0);
            gradients.run(on, table, false);
            EXPECT_EQ(std::memcmp(gradients.dwte.data(), first_dwte.data(), first_dwte.bytes()), 0);
            EXPECT_EQ(std::memcmp(gradients.dwpe.data(), gradients.dwpe_before.data(), first_dwpe.bytes()),
                      0);
        }
    }
}

// Rows are sorted by token, class by class; rows of the same token keep their order. Tokens outside the table
// have no place.
TEST(EncoderOrder, IsStable) {
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

}  // namespace
}  // namespace kernel_test
