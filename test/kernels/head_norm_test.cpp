// The norm of heads and its backward pass against the CPU device.
#include "llmc/device/cuda/head_norm_backward.cuh"
#include "llmc/device/cuda/head_norm_forward.cuh"

#include <cmath>
#include <optional>
#include <vector>

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int heads, size;
};
// A head has a part of a warp, a part with idle lanes, a warp, several warps with one piece to a thread, or
// several with four. The last one has as many pieces as a block can have.
template <class X>
const std::vector<Shape> head_shapes = {{3, 2, 16},
                                        {7, 3, 24},
                                        {5, 5, 128},
                                        {3, 2, 520},
                                        {5, 1, 776},
                                        {3, 1, 4096},
                                        {2, 1, 4 * 384 * (16 / sizeof(X))}};
// Each has two blocks. Threads have one piece and four.
const std::vector<Shape> head_shapes_for_races = {{41, 5, 40}, {9, 3, 520}, {3, 1, 1032}};

constexpr float eps = 0.125f;
constexpr double u = lab::unit_roundoff<float>;

// Heads in rows of their own width, with other elements before and behind them.
template <class X>
struct Rows {
    Rows(const Shape& s, std::int64_t first_element, std::int64_t behind)
        : shape(s), first(first_element), row(first + s.heads * s.size + behind), elements(s.rows * row) {}

    llmc::cuda::HeadPlaces<X> places() { return {elements.data() + first, row}; }
    llmc::cuda::HeadPlaces<const X> const_places() const { return {elements.data() + first, row}; }
    llmc::Heads heads() { return {tensor(elements, {shape.rows, row}), first, shape.heads, shape.size}; }
    std::int64_t place(std::int64_t head, std::int64_t i) const {
        return head / shape.heads * row + first + head % shape.heads * shape.size + i;
    }
    double at(std::int64_t head, std::int64_t i) const { return to_float(elements[place(head, i)]); }
    bool is_other(std::int64_t i) const {
        return i % row < first || i % row >= first + shape.heads * shape.size;
    }

    Shape shape;
    std::int64_t first, row;
    Array<X> elements;
};

template <class X>
void expect_others_equal(Comparison& comparison, const Rows<X>& rows, const Rows<X>& before) {
    for (std::int64_t i = 0; i < rows.elements.size(); ++i) {
        if (!rows.is_other(i)) continue;
        comparison.see_equal("other", i, to_float(rows.elements[i]), to_float(before.elements[i]));
    }
}

template <class X>
llmc::Tensor weight_tensor(Array<X>& weight, bool with_weight) {
    return with_weight ? tensor(weight, {weight.size()}) : llmc::Tensor{};
}

// The operands of both passes. `dweight` accumulates.
template <class X>
struct Operands {
    explicit Operands(const Shape& s)
        : shape(s),
          in(s, 8, 16),
          dout(s, 16, 8),
          out(s, 0, 8),
          weight(s.size),
          rstd(s.rows * s.heads),
          dweight(s.size) {
        Draw draw(seed());
        draw.normal(in.elements, 1, 0.5);
        draw.normal(dout.elements, 1);
        draw.normal(out.elements, 1);
        draw.normal(weight, 0.5, 1);
        draw.normal(rstd, 0.1, 1);
        draw.normal(dweight, 1);
    }
    llmc::cuda::RankSums alone() const { return {nullptr, 0, static_cast<float>(shape.size)}; }

    Shape shape;
    Rows<X> in, dout, out;  // `out` of the forward pass, din of the backward pass
    Array<X> weight;
    Array<float> rstd, dweight;
};

template <class X>
class HeadNorm : public Kernels<X> {
  protected:
    static void forward(const LaunchContext& on, Operands<X>& o, bool with_weight, int block_threads) {
        llmc::cuda::head_norm_forward<X>(on, o.out.places(), o.rstd.data(), o.in.const_places(),
                                         with_weight ? o.weight.data() : nullptr, eps, o.alone(),
                                         o.shape.rows, o.shape.heads, o.shape.size, block_threads);
        synchronize();
    }

    static void backward(const LaunchContext& on, Operands<X>& o, bool with_weight, bool with_dweight,
                         int block_threads, bool in_place = false) {
        Array<float> workspace(static_cast<std::int64_t>(
            llmc::cuda::head_norm_backward_workspace_bytes(on.chip, o.shape.size) / sizeof(float)));
        llmc::cuda::head_norm_backward<X>(on, in_place ? o.dout.places() : o.out.places(),
                                          with_dweight ? o.dweight.data() : nullptr, o.dout.const_places(),
                                          o.in.const_places(), with_weight ? o.weight.data() : nullptr,
                                          o.rstd.data(), o.alone(), o.shape.rows, o.shape.heads, o.shape.size,
                                          workspace.data(), block_threads);
        synchronize();
    }

    // Both devices sum n positive squares of one rounding each, divide, and add eps. The root halves these
    // n + 2 roundings, and rsqrtf has 2 ulp. Two products make an output.
    static void compare_forward(Operands<X>& o, bool with_weight) {
        Operands<X> expected(o.shape), before(o.shape);
        cpu().run(llmc::HeadNormForward{expected.out.heads(), tensor(expected.rstd, {expected.rstd.size()}),
                                        expected.in.heads(), weight_tensor(expected.weight, with_weight),
                                        eps});
        Comparison comparison;
        const double relative = ((o.shape.size + 2) / 2.0 + 4) * u;
        for (std::int64_t head = 0; head < o.rstd.size(); ++head) {
            comparison.see("rstd", head, o.rstd[head], expected.rstd[head],
                           2 * relative * expected.rstd[head]);
            for (std::int64_t i = 0; i < o.shape.size; ++i) {
                const double wanted = expected.out.at(head, i);
                comparison.see("out", o.out.place(head, i), o.out.at(head, i), wanted,
                               twice_rounded<X>(wanted, (relative + 2 * u) * std::fabs(wanted)));
            }
        }
        expect_others_equal(comparison, o.out, before.out);
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }

    // Both devices have a relative error of u for each operation, and n u sum|terms| for a sum of n terms. A
    // term of the sum of g h has 3 operations, and the mean a division. din has one in g, two in the product
    // with the mean, their difference and a product. A term of dweight has 2, and its sum also the old value.
    static void compare_backward(Operands<X>& o, bool with_weight, bool with_dweight) {
        Operands<X> expected(o.shape), before(o.shape);
        const std::int64_t rows = o.shape.rows, size = o.shape.size;
        Array<float> workspace(64 * size);
        cpu().set_workspace(tensor(workspace, {workspace.size()}));
        cpu().run(llmc::HeadNormBackward{
            expected.out.heads(), with_dweight ? tensor(expected.dweight, {size}) : llmc::Tensor{},
            expected.dout.heads(), expected.in.heads(), weight_tensor(expected.weight, with_weight),
            tensor(expected.rstd, {rows, o.shape.heads})});
        cpu().set_workspace({});
        Comparison comparison;
        const auto n = static_cast<double>(size);
        std::vector<double> terms(static_cast<std::size_t>(size));
        for (std::int64_t head = 0; head < o.rstd.size(); ++head) {
            const double r = o.rstd[head];
            const auto h = [&](std::int64_t i) { return o.in.at(head, i) * r; };
            // The gradient is that of `before`: if din is dout, it has been overwritten.
            const auto g = [&](std::int64_t i) {
                return before.dout.at(head, i) * (with_weight ? to_float(o.weight[i]) : 1.0);
            };
            double sum = 0, sum_terms = 0;
            for (std::int64_t i = 0; i < size; ++i) {
                sum += g(i) * h(i);
                sum_terms += std::fabs(g(i) * h(i));
                terms[static_cast<std::size_t>(i)] += std::fabs(before.dout.at(head, i) * h(i));
            }
            for (std::int64_t i = 0; i < size; ++i) {
                const double right = h(i) * sum / n, left = g(i) - right;
                const double error = u * (std::fabs(g(i)) + 2 * std::fabs(right) + std::fabs(left)) +
                                     std::fabs(h(i)) * (n + 4) * u * sum_terms / n;
                const double wanted = expected.out.at(head, i);
                comparison.see("din", o.out.place(head, i), o.out.at(head, i), wanted,
                               twice_rounded<X>(wanted, r * error + u * std::fabs(r * left)));
            }
        }
        for (std::int64_t i = 0; i < size; ++i) {
            const double all = terms[static_cast<std::size_t>(i)] + std::fabs(double{before.dweight[i]});
            comparison.see("dweight", i, o.dweight[i], expected.dweight[i],
                           2 * (static_cast<double>(o.rstd.size()) + 3) * u * all);
        }
        expect_others_equal(comparison, o.out, before.out);
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }
};
TYPED_TEST_SUITE(HeadNorm, Dtypes);

TYPED_TEST(HeadNorm, Forward) {
    for (const auto& on : launch_contexts()) {
        for (const Shape& shape : shapes(head_shapes<TypeParam>, head_shapes_for_races)) {
            for (const bool with_weight : {true, false}) {
                Operands<TypeParam> o(shape);
                this->forward(on, o, with_weight, with_weight ? 256 : 64);
                this->compare_forward(o, with_weight);
            }
        }
    }
}

TYPED_TEST(HeadNorm, Backward) {
    for (const auto& on : launch_contexts()) {
        for (const Shape& shape : shapes(head_shapes<TypeParam>, head_shapes_for_races)) {
            for (const bool with_weight : {true, false}) {
                Operands<TypeParam> o(shape);
                this->backward(on, o, with_weight, with_weight, with_weight ? 384 : 64);
                this->compare_backward(o, with_weight, with_weight);
            }
        }
    }
}

// There are so few blocks that each goes over many heads, with one group of threads or several.
TYPED_TEST(HeadNorm, WalksOverTheHeads) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    for (const Shape& shape :
         shapes<Shape>({{45, 3, 16}, {70, 2, 72}, {23, 1, 520}, {9, 1, 1032}}, {{23, 1, 520}})) {
        for (const int block_threads : {32, 128, 384}) {
            Operands<TypeParam> o(shape);
            this->backward(on, o, true, true, block_threads);
            this->compare_backward(o, true, true);
        }
    }
}

TYPED_TEST(HeadNorm, BackwardHasTheSameBitsInPlaceAgainAndWithoutDweight) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    for (const Shape& shape : shapes<Shape>({{45, 3, 24}, {9, 1, 1032}})) {
        Operands<TypeParam> o(shape), again(shape), alone(shape), in_place(shape);
        this->backward(on, o, true, true, 384);
        this->backward(on, again, true, true, 384);
        this->backward(on, alone, true, false, 384);
        this->backward(on, in_place, true, true, 384, true);
        EXPECT_EQ(std::memcmp(o.out.elements.data(), again.out.elements.data(), o.out.elements.bytes()), 0);
        EXPECT_EQ(std::memcmp(o.dweight.data(), again.dweight.data(), o.dweight.bytes()), 0);
        EXPECT_EQ(std::memcmp(o.out.elements.data(), alone.out.elements.data(), o.out.elements.bytes()), 0);
        EXPECT_EQ(std::memcmp(o.dweight.data(), in_place.dweight.data(), o.dweight.bytes()), 0);
        const Operands<TypeParam> before(shape);
        for (std::int64_t head = 0; head < o.rstd.size(); ++head) {
            for (std::int64_t i = 0; i < shape.size; ++i) {
                ASSERT_EQ(in_place.dout.at(head, i), o.out.at(head, i)) << head << " " << i;
            }
        }
        for (std::int64_t i = 0; i < before.dout.elements.size(); ++i) {
            if (before.dout.is_other(i)) {
                ASSERT_EQ(to_float(in_place.dout.elements[i]), to_float(before.dout.elements[i]));
            }
        }
    }
}

// 1, 2 or 4 ranks have equal parts of each row. Their sums together normalize as the whole row's does, up to
// the order of the terms. Both sums of n terms have an error of (n + 2) u, and at most 3 more for the parts.
// One rank has the bits of the whole.
TYPED_TEST(HeadNorm, OfRowsThatRanksShare) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    for (const Shape& shape :
         shapes<Shape>({{75, 1, 64}, {11, 1, 2080}, {3, 1, 4096}}, {{75, 1, 64}, {13, 1, 2080}})) {
        Operands<X> whole(shape);
        this->forward(on, whole, true, 256);
        Operands<X> backward(shape);
        backward.rstd.copy_from(whole.rstd);
        this->backward(on, backward, true, true, 384);
        for (const int ranks : {1, 2, 4}) {
            const int part = shape.size / ranks;
            Array<float> sums(ranks * shape.rows), gradient_sums(ranks * shape.rows);
            for (int rank = 0; rank < ranks; ++rank) {
                const llmc::cuda::HeadPlaces<const X> in{
                    whole.in.elements.data() + whole.in.first + rank * part, whole.in.row};
                const llmc::cuda::HeadPlaces<const X> dout{
                    whole.dout.elements.data() + whole.dout.first + rank * part, whole.dout.row};
                llmc::cuda::head_norm_sums<X>(on, sums.data() + rank * shape.rows, in, shape.rows, part);
                llmc::cuda::head_norm_backward_sums<X>(on, gradient_sums.data() + rank * shape.rows, dout, in,
                                                       whole.weight.data() + rank * part, whole.rstd.data(),
                                                       shape.rows, part);
            }
            synchronize();
            Operands<X> shared(shape);  // the parts of all ranks, side by side
            for (int rank = 0; rank < ranks; ++rank) {
                const llmc::cuda::HeadPlaces<const X> in{
                    shared.in.elements.data() + shared.in.first + rank * part, shared.in.row};
                llmc::cuda::head_norm_forward<X>(
                    on, {shared.out.elements.data() + shared.out.first + rank * part, shared.out.row},
                    shared.rstd.data(), in, shared.weight.data() + rank * part, eps,
                    {sums.data(), ranks, static_cast<float>(shape.size)}, shape.rows, 1, part);
            }
            synchronize();
            Comparison comparison;
            const double n = shape.size, relative = (n + 5) / 2 * u + 5 * u;
            for (std::int64_t row = 0; row < shape.rows; ++row) {
                comparison.see("rstd", row, shared.rstd[row], whole.rstd[row],
                               ranks == 1 ? 0x1p-1000 : 2 * relative * whole.rstd[row]);
                for (std::int64_t i = 0; i < shape.size; ++i) {
                    const double wanted = whole.out.at(row, i);
                    comparison.see("out", row * shape.size + i, shared.out.at(row, i), wanted,
                                   ranks == 1
                                       ? 0x1p-1000
                                       : twice_rounded<X>(wanted, (relative + 2 * u) * std::fabs(wanted)));
                }
            }
            Operands<X> gradients(shape);
            gradients.rstd.copy_from(whole.rstd);
            Array<float> workspace(static_cast<std::int64_t>(
                llmc::cuda::head_norm_backward_workspace_bytes(on.chip, part) / sizeof(float)));
            for (int rank = 0; rank < ranks; ++rank) {
                const auto of_rank = [&](Rows<X>& rows) {
                    return llmc::cuda::HeadPlaces<X>{rows.elements.data() + rows.first + rank * part,
                                                     rows.row};
                };
                const auto in = of_rank(gradients.in), dout = of_rank(gradients.dout);
                llmc::cuda::head_norm_backward<X>(
                    on, of_rank(gradients.out), gradients.dweight.data() + rank * part,
                    {dout.first, dout.stride}, {in.first, in.stride}, gradients.weight.data() + rank * part,
                    gradients.rstd.data(), {gradient_sums.data(), ranks, static_cast<float>(shape.size)},
                    shape.rows, 1, part, workspace.data());
            }
            synchronize();
            for (std::int64_t row = 0; row < shape.rows; ++row) {
                const double r = whole.rstd[row];
                double sum = 0, terms = 0;
                for (std::int64_t i = 0; i < shape.size; ++i) {
                    const double gh =
                        whole.dout.at(row, i) * to_float(whole.weight[i]) * whole.in.at(row, i) * r;
                    sum += gh;
                    terms += std::fabs(gh);
                }
                for (std::int64_t i = 0; i < shape.size; ++i) {
                    const double h = whole.in.at(row, i) * r, right = h * sum / n;
                    const double g = whole.dout.at(row, i) * to_float(whole.weight[i]);
                    const double error = u * (std::fabs(g) + 2 * std::fabs(right) + std::fabs(g - right)) +
                                         std::fabs(h) * (n + 7) * u * terms / n;
                    const double wanted = backward.out.at(row, i);
                    comparison.see(
                        "din", row * shape.size + i, gradients.out.at(row, i), wanted,
                        ranks == 1 ? 0x1p-1000 : twice_rounded<X>(wanted, r * error + u * std::fabs(wanted)));
                }
            }
            // The terms of dweight are the same, but perhaps in other blocks.
            for (std::int64_t i = 0; i < shape.size; ++i) {
                double terms = std::fabs(double{shared.dweight[i]});
                for (std::int64_t row = 0; row < shape.rows; ++row) {
                    terms += std::fabs(whole.dout.at(row, i) * whole.in.at(row, i) * whole.rstd[row]);
                }
                comparison.see("dweight", i, gradients.dweight[i], backward.dweight[i],
                               2 * (static_cast<double>(shape.rows) + 3) * u * terms);
            }
            EXPECT_TRUE(comparison.good()) << ranks << " ranks: " << comparison.first_failure();
        }
    }
}

TYPED_TEST(HeadNorm, RefusesWhatItCannotDo) {
    using X = TypeParam;
    const auto on = launch_contexts().front();
    const Shape longest{1, 1, 4 * 384 * (16 / sizeof(X))};
    Operands<X> o(longest);
    const auto run = [&](int first, int size, int block_threads) {
        llmc::cuda::head_norm_forward<X>(on, {o.out.elements.data() + first, o.out.row}, o.rstd.data(),
                                         o.in.const_places(), nullptr, eps, o.alone(), 1, 1, size,
                                         block_threads);
        synchronize();
    };
    EXPECT_NO_THROW(run(0, longest.size, 256));
    EXPECT_THROW(run(1, 16, 256), llmc::ProgrammingError);
    EXPECT_THROW(run(0, 17, 256), llmc::ProgrammingError);
    EXPECT_THROW(run(0, longest.size + 8, 256), llmc::ProgrammingError);
    EXPECT_THROW(run(0, 16, 416), llmc::ProgrammingError);
}

}  // namespace
}  // namespace kernel_test
