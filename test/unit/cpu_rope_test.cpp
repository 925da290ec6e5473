// The CPU's rotary positions against plain loops in double precision.
#include <array>
#include <vector>

#include "test/unit/cpu_test_support.h"
#include "test/unit/head_layout.h"

namespace llmc::cpu_test {

namespace {

class CpuRope : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
    double uX = roundoff(GetParam());
};

TEST_P(CpuRope, RopeTurnsPairs) {
    for (const auto& [B, T, count, size, first, behind, position] :
         {std::array<std::int64_t, 7>{1, 1, 1, 2, 0, 0, 0},
          {2, 5, 3, 24, 8, 16, 0},
          {3, 4, 2, 128, 0, 128, 37},
          {1, 9, 5, 10, 1, 0, 2}}) {
        const Layout layout{B * T, count, size, first, behind};
        const OwnedTensor before = normal(X, {B, T, layout.row()}, "x");
        const OwnedTensor angles = normal(DType::fp32, {position + T + 1, size / 2, 2}, "angles");
        for (const bool inverse : {false, true}) {
            OwnedTensor x = copy(before);
            Operations()->rope(layout.of(x), angles, position, inverse);
            std::vector<double> reference, bound;
            for (std::int64_t head = 0; head < B * T * count; ++head) {
                for (std::int64_t i = 0; i < size; ++i) {
                    const std::int64_t t = position + head / count % T, half = size / 2, pair = i % half;
                    const double cos = angles.get((t * half + pair) * 2);
                    const double sin = angles.get((t * half + pair) * 2 + 1) * (inverse ? -1.0 : 1.0);
                    const double own = before.get(layout.place(head, i)) * cos;
                    const double other = i < half ? -before.get(layout.place(head, i + half)) * sin
                                                  : before.get(layout.place(head, i - half)) * sin;
                    reference.push_back(own + other);
                    // The two products and their sum are rounded, and then the result.
                    bound.push_back(u32 * 2.0 * (std::fabs(own) + std::fabs(other)) +
                                    uX * (1.0 + uX) * std::fabs(own + other));
                }
            }
            expect_heads(layout, x, before, reference, bound, inverse ? "inverse" : "rope");
        }
    }
}

// A right angle exchanges the halves exactly; the inverse gives them back.
TEST_P(CpuRope, RopeIsUndoneByItsInverse) {
    const std::int64_t T = 7, count = 2, size = 16;
    const OwnedTensor before = normal(X, {T, count * size}, "x");
    OwnedTensor angles(DType::fp32, {T, size / 2, 2});
    for (std::int64_t i = 0; i < T * size; i += 2) angles.set(i + 1, 1.0);
    OwnedTensor x = copy(before);
    Operations ops;
    ops->rope({x, 0, count, size}, angles, 0, false);
    for (std::int64_t i = 0; i < size / 2; ++i) {
        EXPECT_EQ(x.get(i), -before.get(i + size / 2));
        EXPECT_EQ(x.get(i + size / 2), before.get(i));
    }
    ops->rope({x, 0, count, size}, angles, 0, true);
    expect_same_bits(x, before, "twice");
}

TEST_P(CpuRope, RopeOfOneRowHasTheBitsOfItsPosition) {
    const std::int64_t T = 6, size = 40;
    const OwnedTensor before = normal(X, {T, size}, "x");
    const OwnedTensor angles = normal(DType::fp32, {T, size / 2, 2}, "angles");
    Operations ops;
    OwnedTensor whole = copy(before), one_by_one = copy(before);
    ops->rope({whole, 0, 1, size}, angles, 0, false);
    for (std::int64_t t = 0; t < T; ++t) ops->rope({one_by_one->slice(t, 1), 0, 1, size}, angles, t, false);
    expect_same_bits(one_by_one, whole, "rows");
}

TEST_P(CpuRope, RopeRefusesWrongOperands) {
    OwnedTensor x(X, {2, 5, 24});
    const OwnedTensor angles(DType::fp32, {8, 4, 2});
    Operations ops;
    EXPECT_NO_THROW(ops->rope({x, 0, 3, 8}, angles, 3, false));
    EXPECT_THROW(ops->rope({x, 0, 3, 8}, angles, 4, false), ProgrammingError);  // too few positions
    EXPECT_THROW(ops->rope({x, 0, 3, 8}, angles, -1, false), ProgrammingError);
    EXPECT_THROW(ops->rope({x, 1, 3, 8}, angles, 0, false), ProgrammingError);  // outside the rows
    EXPECT_THROW(ops->rope({x, -8, 3, 8}, angles, 0, false), ProgrammingError);
    EXPECT_THROW(ops->rope({x, 0, 3, 6}, angles, 0, false), ProgrammingError);
    EXPECT_THROW(ops->rope({x->view({240}), 0, 3, 8}, angles, 0, false), ProgrammingError);
    EXPECT_THROW(ops->rope({x, 0, 3, 7}, OwnedTensor(DType::fp32, {8, 3, 2}), 0, false), ProgrammingError);
}

TEST_P(CpuRope, BitsDoNotDependOnThreads) {
    const Layout at{200, 3, 64, 8, 0};
    const OwnedTensor before = normal(X, at.shape(), "x");
    const OwnedTensor angles = normal(DType::fp32, {at.rows, at.size / 2, 2}, "angles");
    OwnedTensor one = copy(before);
    Operations(1)->rope(at.of(one), angles, 0, false);
    for (const int threads : {3, 2}) {
        OwnedTensor x = copy(before);
        Operations(threads)->rope(at.of(x), angles, 0, false);
        expect_same_bits(x, one, "threads");
    }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuRope, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
