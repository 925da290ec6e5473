// Rotary positions against the CPU device.
#include "llmc/device/cuda/rope.cuh"

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

// Heads from element `first` on; `behind` elements follow them in each row.
struct Shape {
    std::int64_t batch, sequence;
    int first, heads, size, behind;
};
// More heads than a thread holds, and fewer; halves that are whole pieces of 16 bytes, and others (24, 40).
const std::vector<Shape> rope_shapes = {{2, 3, 0, 1, 16, 0},  {9, 5, 8, 9, 24, 16}, {1, 7, 16, 4, 40, 8},
                                        {2, 13, 0, 6, 64, 8}, {9, 5, 8, 9, 64, 0},  {5, 2, 128, 3, 128, 0}};
const std::vector<Shape> rope_shapes_for_races = {{3, 9, 8, 9, 64, 0}, {4, 9, 8, 9, 24, 0}};

template <class X>
class Rope : public Kernels<X> {};
TYPED_TEST_SUITE(Rope, Dtypes);

TYPED_TEST(Rope, TurnsAsTheCpuDoes) {
    using X = TypeParam;
    constexpr double u = lab::unit_roundoff<float>;
    constexpr std::int64_t position = 5;
    for (const auto& on : launch_contexts()) {
        for (const Shape& s : shapes(rope_shapes, rope_shapes_for_races)) {
            const std::int64_t rows = s.batch * s.sequence, row = s.first + s.heads * s.size + s.behind;
            const std::int64_t positions = position + s.sequence;
            for (const bool inverse : {false, true}) {
                Draw draw(seed());
                Array<X> before(rows * row), x(rows * row), expected(rows * row);
                Array<float> angles(positions * s.size);
                draw.normal(before, 1);
                draw.normal(angles, 1);  // any numbers
                x.copy_from(before);
                expected.copy_from(before);
                llmc::cuda::rope<X>(on, {x.data() + s.first, row}, angles.data(), rows, s.sequence, s.heads,
                                    s.size, position, inverse);
                synchronize();
                cpu().run(llmc::Rope{{tensor(expected, {s.batch, s.sequence, row}), s.first, s.heads, s.size},
                                     tensor(angles, {positions, s.size / 2, 2}),
                                     position,
                                     inverse});
                Comparison comparison;
                for (std::int64_t i = 0; i < x.size(); ++i) {
                    const std::int64_t place = i % row - s.first;
                    if (place < 0 || place >= s.heads * s.size) {
                        comparison.see_equal("other", i, to_float(x[i]), to_float(before[i]));
                        continue;
                    }
                    // Each device rounds at most the two products and their sum.
                    const std::int64_t in_head = place % s.size, half = s.size / 2;
                    const std::int64_t angle =
                        2 * ((position + i / row % s.sequence) * half + in_head % half);
                    const double other = to_float(before[in_head < half ? i + half : i - half]);
                    const double terms = std::fabs(to_float(before[i]) * double{angles[angle]}) +
                                         std::fabs(other * double{angles[angle + 1]});
                    const double wanted = to_float(expected[i]);
                    comparison.see("x", i, to_float(x[i]), wanted, twice_rounded<X>(wanted, 2 * u * terms));
                }
                EXPECT_TRUE(comparison.good()) << comparison.first_failure();
            }
        }
    }
}

TYPED_TEST(Rope, RefusesHeadsThatAreNotWholePieces) {
    using X = TypeParam;
    const auto on = launch_contexts().front();
    Array<X> x(64);
    Array<float> angles(64);
    const auto run = [&](int first, std::int64_t row, int size) {
        llmc::cuda::rope<X>(on, {x.data() + first, row}, angles.data(), 1, 1, 1, size, 0, false);
    };
    EXPECT_NO_THROW(run(0, 32, 16));
    EXPECT_THROW(run(1, 32, 16), llmc::ProgrammingError);
    EXPECT_THROW(run(0, 33, 16), llmc::ProgrammingError);
    EXPECT_THROW(run(0, 32, 12), llmc::ProgrammingError);
    synchronize();
}

}  // namespace
}  // namespace kernel_test
