// The CPU's matrix products, forward and backward, against plain loops in double precision. In bf16, both
// ways are tested: oneDNN's own products (if the processor has them), and products widened to fp32. A forward
// product of one row is a third way.
#include "llmc/device/cpu/vector_math.h"
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

struct Sizes {
    std::int64_t N, IC, OC;

    std::int64_t largest() const { return std::max(IC, OC); }
};

class CpuMatmul : public testing::TestWithParam<Arithmetic> {
  protected:
    DType X = GetParam().dtype;
    double uX = roundoff(GetParam().dtype);

    Operations operations(const Sizes& s, int threads = 3) const {
        return Operations(WorkspaceRequest{1, s.N, 1, 1, s.largest(), s.N, X}, GetParam().native_bf16,
                          threads);
    }
};

// A product of one row adds in 32 lanes (lane_sum()): the first three sizes have fewer terms, no rest, and a rest.
// Products are widened in tiles of 1024. Each of the last four sizes has more than one tile, and together
// they cover each dimension. The last size has two equal tiles: the first overwrites, the second accumulates.
// 63 x 96 x 51 and 78 x 69 x 75 are wrong with oneDNN 2.6 and AMX.
constexpr std::array sizes = {Sizes{1, 5, 3},     Sizes{1, 64, 1},    Sizes{1, 1101, 131}, Sizes{13, 24, 37},
                              Sizes{33, 64, 128}, Sizes{63, 96, 51},  Sizes{78, 69, 75},   Sizes{64, 130, 72},
                              Sizes{1030, 12, 9}, Sizes{3, 1100, 11}, Sizes{2, 7, 1050},   Sizes{2, 2048, 3}};

// A sum of products and its error bound: each product and each addition of K terms rounds once.
struct Dot {
    double value = 0.0;
    double size = 0.0;
    double terms = 2.0;

    void add(double a, double b) {
        value += a * b;
        size += std::fabs(a * b);
        terms += 1.0;
    }
    double error() const { return terms * u32 * size; }
};

std::vector<Dot> forward_sums(const Sizes& s, const OwnedTensor& in, const OwnedTensor& weight,
                              const OwnedTensor* bias) {
    std::vector<Dot> sums;
    for (std::int64_t n = 0; n < s.N; ++n) {
        for (std::int64_t o = 0; o < s.OC; ++o) {
            Dot& dot = sums.emplace_back();
            for (std::int64_t i = 0; i < s.IC; ++i) dot.add(in.get(n * s.IC + i), weight.get(o * s.IC + i));
            if (bias != nullptr) dot.add(bias->get(o), 1.0);
        }
    }
    return sums;
}

std::vector<double> values(const std::vector<Dot>& sums) {
    std::vector<double> v;
    for (const Dot& dot : sums) v.push_back(dot.value);
    return v;
}

TEST_P(CpuMatmul, Forward) {
    for (const Sizes& s : sizes) {
        const OwnedTensor in = normal(X, {s.N, s.IC}, "in");
        const OwnedTensor weight = normal(X, {s.OC, s.IC}, "weight");
        const OwnedTensor bias = normal(X, {s.OC}, "bias", 3.0);
        Operations ops = operations(s);
        for (const bool with_bias : {false, true}) {
            const auto sums = forward_sums(s, in, weight, with_bias ? &bias : nullptr);
            OwnedTensor out = garbage(X, {s.N, s.OC});
            ops->matmul_forward(out, in, weight, with_bias ? *bias : Tensor{});
            const auto bound = [&](std::size_t i) {
                return sums[i].error() + uX * (std::fabs(sums[i].value) + sums[i].error());
            };
            expect_close(out, values(sums), bound, "product");

            // GELU is computed from the stored numbers, so from exactly those in pre_gelu.
            OwnedTensor pre_gelu = garbage(X, {s.N, s.OC});
            OwnedTensor activated = garbage(X, {s.N, s.OC});
            ops->matmul_forward(activated, in, weight, with_bias ? *bias : Tensor{}, pre_gelu);
            expect_close(pre_gelu, values(sums), bound, "product before GELU");
            OwnedTensor expected(X, {s.N, s.OC});
            for (std::int64_t i = 0; i < out->elements(); ++i) {
                expected.set(i, cpu::gelu(static_cast<float>(pre_gelu.get(i))));
            }
            expect_same_bits(activated, expected, "GELU of the product");
        }
    }
}

TEST_P(CpuMatmul, BackwardOfTheInput) {
    for (const Sizes& s : sizes) {
        const OwnedTensor in = normal(X, {s.N, s.IC}, "in");
        const OwnedTensor weight = normal(X, {s.OC, s.IC}, "weight");
        const OwnedTensor dout = normal(X, {s.N, s.OC}, "dout");
        const OwnedTensor pre_gelu = normal(X, {s.N, s.IC}, "pre_gelu", 2.0);
        Operations ops = operations(s);
        std::vector<Dot> sums;
        for (std::int64_t n = 0; n < s.N; ++n) {
            for (std::int64_t i = 0; i < s.IC; ++i) {
                Dot& dot = sums.emplace_back();
                for (std::int64_t o = 0; o < s.OC; ++o) {
                    dot.add(dout.get(n * s.OC + o), weight.get(o * s.IC + i));
                }
            }
        }
        OwnedTensor din = garbage(X, {s.N, s.IC});
        ops->matmul_backward(din, {}, {}, dout, in, weight);
        expect_close(
            din, values(sums),
            [&](std::size_t i) {
                return sums[i].error() + uX * (std::fabs(sums[i].value) + sums[i].error());
            },
            "din");

        // The reference is multiplied by the program's own GELU', which another test checks. The
        // multiplication adds one rounding in fp32; there is still only one rounding to X.
        din = garbage(X, {s.N, s.IC});
        ops->matmul_backward(din, {}, {}, dout, in, weight, pre_gelu);
        std::vector<double> reference, bound;
        for (std::size_t i = 0; i < sums.size(); ++i) {
            const double slope =
                cpu::gelu_derivative(static_cast<float>(pre_gelu.get(static_cast<std::int64_t>(i))));
            reference.push_back(sums[i].value * slope);
            const double error = std::fabs(slope) * (sums[i].error() + u32 * std::fabs(sums[i].value));
            bound.push_back(error + uX * (std::fabs(reference[i]) + error));
        }
        expect_close(
            din, reference, [&](std::size_t i) { return bound[i]; }, "din through GELU");
    }
}

TEST_P(CpuMatmul, GradientsOfParametersAccumulate) {
    for (const Sizes& s : sizes) {
        const OwnedTensor in = normal(X, {s.N, s.IC}, "in");
        const OwnedTensor weight = normal(X, {s.OC, s.IC}, "weight");
        const OwnedTensor dout = normal(X, {s.N, s.OC}, "dout");
        OwnedTensor dweight = normal(DType::fp32, {s.OC, s.IC}, "dweight");
        OwnedTensor dbias = normal(DType::fp32, {s.OC}, "dbias");
        Operations ops = operations(s);
        // The initial value, then the terms of two calls.
        std::vector<Dot> weight_sums(static_cast<std::size_t>(s.OC * s.IC));
        std::vector<Dot> bias_sums(static_cast<std::size_t>(s.OC));
        for (std::size_t i = 0; i < weight_sums.size(); ++i) {
            weight_sums[i].add(dweight.get(static_cast<std::int64_t>(i)), 1.0);
        }
        for (std::size_t i = 0; i < bias_sums.size(); ++i) {
            bias_sums[i].add(dbias.get(static_cast<std::int64_t>(i)), 1.0);
        }
        for (int call = 0; call < 2; ++call) {
            ops->matmul_backward({}, dweight, dbias, dout, in, weight);
            for (std::int64_t n = 0; n < s.N; ++n) {
                for (std::int64_t o = 0; o < s.OC; ++o) {
                    const double d = dout.get(n * s.OC + o);
                    bias_sums[static_cast<std::size_t>(o)].add(d, 1.0);
                    for (std::int64_t i = 0; i < s.IC; ++i) {
                        weight_sums[static_cast<std::size_t>(o * s.IC + i)].add(d, in.get(n * s.IC + i));
                    }
                }
            }
        }
        expect_close(
            dweight, values(weight_sums), [&](std::size_t i) { return weight_sums[i].error(); }, "dweight");
        expect_close(
            dbias, values(bias_sums), [&](std::size_t i) { return bias_sums[i].error(); }, "dbias");
    }
}

TEST_P(CpuMatmul, AllGradientsAtOnceAreThoseOneByOne) {
    const Sizes s{33, 24, 37};
    const OwnedTensor in = normal(X, {s.N, s.IC}, "in");
    const OwnedTensor weight = normal(X, {s.OC, s.IC}, "weight");
    const OwnedTensor dout = normal(X, {s.N, s.OC}, "dout");
    const OwnedTensor pre_gelu = normal(X, {s.N, s.IC}, "pre_gelu");
    Operations ops = operations(s);
    const auto zero = [&](const Shape& shape) { return filled(DType::fp32, shape, 0.0); };
    OwnedTensor din = garbage(X, {s.N, s.IC});
    OwnedTensor dweight = zero({s.OC, s.IC});
    OwnedTensor dbias = zero({s.OC});
    ops->matmul_backward(din, dweight, dbias, dout, in, weight, pre_gelu);
    OwnedTensor only_din = garbage(X, {s.N, s.IC});
    OwnedTensor only_dweight = zero({s.OC, s.IC});
    OwnedTensor only_dbias = zero({s.OC});
    ops->matmul_backward(only_din, {}, {}, dout, in, weight, pre_gelu);
    ops->matmul_backward({}, only_dweight, {}, dout, in, weight, pre_gelu);
    ops->matmul_backward({}, {}, only_dbias, dout, in, weight);
    expect_same_bits(din, only_din, "din");
    expect_same_bits(dweight, only_dweight, "dweight");
    expect_same_bits(dbias, only_dbias, "dbias");
}

// oneDNN would divide the sums of 2048 rows among threads (products.cpp).
TEST_P(CpuMatmul, BitsDependNeitherOnTheRunNorOnTheThreads) {
    for (const Sizes& s : {Sizes{257, 192, 130}, Sizes{2048, 64, 72}, Sizes{1, 197, 131}}) {
        const OwnedTensor in = normal(X, {s.N, s.IC}, "in");
        const OwnedTensor weight = normal(X, {s.OC, s.IC}, "weight");
        const OwnedTensor bias = normal(X, {s.OC}, "bias");
        const OwnedTensor dout = normal(X, {s.N, s.OC}, "dout");
        std::vector<std::vector<std::byte>> first;
        for (const int threads : {1, 3, 3, 8}) {
            Operations ops = operations(s, threads);
            OwnedTensor out = garbage(X, {s.N, s.OC});
            OwnedTensor din = garbage(X, {s.N, s.IC});
            OwnedTensor dweight = filled(DType::fp32, {s.OC, s.IC}, 0.0);
            OwnedTensor dbias = filled(DType::fp32, {s.OC}, 0.0);
            ops->matmul_forward(out, in, weight, bias);
            ops->matmul_backward(din, dweight, dbias, dout, in, weight);
            const std::vector bits = {out.bytes(), din.bytes(), dweight.bytes(), dbias.bytes()};
            if (first.empty()) first = bits;
            EXPECT_TRUE(bits == first) << s.N << " rows, " << threads << " threads";
        }
    }
}

TEST_P(CpuMatmul, LeadingDimensionsAreRows) {
    const OwnedTensor in = normal(X, {2, 3, 8}, "in");
    const OwnedTensor weight = normal(X, {3, 2, 2, 8}, "weight");  // a qkv weight (3,NH,HS,C)
    Operations ops = operations({6, 8, 12});
    OwnedTensor out = garbage(X, {2, 3, 3, 4});
    EXPECT_THROW(ops->matmul_forward(out, in, weight, {}), ProgrammingError);
    OwnedTensor flat = garbage(X, {6, 12});
    ops->matmul_forward(flat, in, weight, {});
    OwnedTensor cube = garbage(X, {2, 3, 12});
    ops->matmul_forward(cube, in, weight, {});
    expect_same_bits(cube, flat, "rows");
}

TEST_P(CpuMatmul, NoRowsChangeNothing) {
    Operations ops = operations({4, 8, 6});
    const OwnedTensor in(X, {0, 8});
    const OwnedTensor weight = normal(X, {6, 8}, "weight");
    OwnedTensor out(X, {0, 6});
    OwnedTensor din(X, {0, 8});
    OwnedTensor dweight = filled(DType::fp32, {6, 8}, 2.0);
    OwnedTensor dbias = filled(DType::fp32, {6}, 3.0);
    // An empty tensor has no memory of its own, but it is present.
    std::byte place{};
    const auto there = [&](const OwnedTensor& t) { return Tensor{&place, t->dtype, t->shape}; };
    ops->matmul_forward(there(out), there(in), weight, {}, there(out));
    ops->matmul_backward(there(din), dweight, dbias, there(out), there(in), weight);
    expect_same_bits(dweight, filled(DType::fp32, {6, 8}, 2.0), "dweight");
    expect_same_bits(dbias, filled(DType::fp32, {6}, 3.0), "dbias");
}

TEST_P(CpuMatmul, WrongShapesAndDtypesAreRefused) {
    Operations ops = operations({4, 8, 6});
    OwnedTensor out(X, {4, 6});
    const OwnedTensor in(X, {4, 8});
    const OwnedTensor weight(X, {6, 8});
    OwnedTensor dweight(DType::fp32, {6, 8});
    EXPECT_NO_THROW(ops->matmul_forward(out, in, weight, {}));
    EXPECT_THROW(ops->matmul_forward(out, in, OwnedTensor(X, {8, 6}), {}), ProgrammingError);
    EXPECT_THROW(ops->matmul_forward(out, OwnedTensor(X, {3, 8}), weight, {}), ProgrammingError);
    EXPECT_THROW(ops->matmul_forward(out, in, weight, OwnedTensor(X, {8})), ProgrammingError);
    EXPECT_THROW(ops->matmul_forward(out, in, weight, {}, OwnedTensor(X, {4, 8})), ProgrammingError);
    const DType other = X == DType::fp32 ? DType::bf16 : DType::fp32;
    EXPECT_THROW(ops->matmul_forward(out, OwnedTensor(other, {4, 8}), weight, {}), ProgrammingError);
    EXPECT_THROW(ops->matmul_backward({}, OwnedTensor(DType::bf16, {6, 8}), {}, out, in, weight),
                 ProgrammingError);
    EXPECT_THROW(ops->matmul_backward({}, {}, OwnedTensor(DType::fp32, {8}), out, in, weight),
                 ProgrammingError);
    EXPECT_THROW(ops->matmul_backward(OwnedTensor(X, {4, 6}), {}, {}, out, in, weight), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(Arithmetics, CpuMatmul, testing::ValuesIn(arithmetics()),
                         [](const auto& param) { return param.param.name(); });

}  // namespace

}  // namespace llmc::cpu_test
