// The CPU's operations in parts, as pipeline and tensor parallelism call them: gradients one at a time, and tables and
// logits of which a rank has some rows or columns. Parts give what the whole gives.
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

class CpuParts : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
};

// ---- gradients one at a time

TEST_P(CpuParts, LayernormBackwardHasTheSameBitsInParts) {
    for (const auto& [N, C] : {std::array<std::int64_t, 2>{1, 1}, {13, 5}, {33, 37}, {150, 96}}) {
        const OwnedTensor x = normal(X, {N, C}, "x");
        const OwnedTensor dout = normal(X, {N, C}, "dout");
        const OwnedTensor gamma = normal(X, {C}, "gamma");
        const OwnedTensor mean = normal(DType::fp32, {N}, "mean", 0.1);
        const OwnedTensor rstd = normal(DType::fp32, {N}, "rstd", 0.1, 1.0);
        const OwnedTensor start = normal(X, {N, C}, "din");
        const OwnedTensor start_gamma = normal(DType::fp32, {C}, "dgamma");
        Operations ops;
        OwnedTensor din = copy(start), dgamma = copy(start_gamma), dbeta = copy(start_gamma);
        ops->layernorm_backward(din, dgamma, dbeta, dout, x, gamma, mean, rstd);
        OwnedTensor only_din = copy(start);
        ops->layernorm_backward(only_din, {}, {}, dout, x, gamma, mean, rstd);
        OwnedTensor only_dgamma = copy(start_gamma), only_dbeta = copy(start_gamma);
        ops->layernorm_backward({}, only_dgamma, only_dbeta, dout, x, gamma, mean, rstd);
        expect_same_bits(only_din, din, "din");
        expect_same_bits(only_dgamma, dgamma, "dgamma");
        expect_same_bits(only_dbeta, dbeta, "dbeta");
        EXPECT_THROW(ops->layernorm_backward(din, dgamma, {}, dout, x, gamma, mean, rstd), ProgrammingError);
        EXPECT_THROW(ops->layernorm_backward(din, {}, dbeta, dout, x, gamma, mean, rstd), ProgrammingError);
    }
}

TEST_P(CpuParts, MatmulBackwardHasTheSameBitsInParts) {
    for (const bool native_bf16 : {false, X == DType::bf16 && cpu::processor_has_bf16()}) {
        const std::int64_t N = 33, IC = 24, OC = 37;
        const OwnedTensor in = normal(X, {N, IC}, "in");
        const OwnedTensor weight = normal(X, {OC, IC}, "weight");
        const OwnedTensor dout = normal(X, {N, OC}, "dout");
        const OwnedTensor start_weight = normal(DType::fp32, {OC, IC}, "dweight");
        const OwnedTensor start_bias = normal(DType::fp32, {OC}, "dbias");
        const OwnedTensor pre_gelu = normal(X, {N, IC}, "pre_gelu");
        for (const Tensor& before_gelu : {Tensor{}, *pre_gelu}) {
            Operations ops(WorkspaceRequest{1, N, 1, 1, OC, N, X}, native_bf16);
            OwnedTensor din = garbage(X, {N, IC}), dweight = copy(start_weight), dbias = copy(start_bias);
            ops->matmul_backward(din, dweight, dbias, dout, in, weight, before_gelu);
            OwnedTensor only_din = garbage(X, {N, IC});
            ops->matmul_backward(only_din, {}, {}, dout, in, weight, before_gelu);
            OwnedTensor only_dweight = copy(start_weight), only_dbias = copy(start_bias);
            ops->matmul_backward({}, only_dweight, only_dbias, dout, in, weight);
            expect_same_bits(only_din, din, "din");
            expect_same_bits(only_dweight, dweight, "dweight");
            expect_same_bits(only_dbias, dbias, "dbias");
        }
    }
}

// ---- rows of a table

TEST_P(CpuParts, EncoderOutputsAddUpToTheWhole) {
    const std::int64_t B = 3, T = 13, C = 24, V = 37;
    const OwnedTensor wte = normal(X, {V, C}, "wte"), wpe = normal(X, {T, C}, "wpe");
    const OwnedTensor tokens = integers({B, T}, "tokens", 0, V);
    Operations ops;
    OwnedTensor whole = garbage(X, {B, T, C});
    ops->encoder_forward(whole, tokens, wte, wpe);
    const OwnedTensor dout = normal(X, {B, T, C}, "dout");
    const OwnedTensor start = normal(DType::fp32, {V, C}, "dwte");
    OwnedTensor dwte = copy(start), dwpe = filled(DType::fp32, {T, C}, 0.0);
    ops->encoder_backward(dwte, dwpe, dout, tokens);
    // Parts with no token among them, and of one row, are parts too.
    for (const std::vector<std::int64_t>& firsts : {std::vector<std::int64_t>{0}, {0, 20}, {0, 1, 30, 36}}) {
        OwnedTensor sum = filled(X, {B, T, C}, 0.0);
        OwnedTensor dwte_of_parts = copy(start);
        for (std::size_t part = 0; part < firsts.size(); ++part) {
            const std::int64_t first = firsts[part];
            const std::int64_t rows = (part + 1 < firsts.size() ? firsts[part + 1] : V) - first;
            OwnedTensor out = garbage(X, {B, T, C});
            ops->encoder_forward(out, tokens, wte->slice(first, rows), part == 0 ? *wpe : Tensor{}, first);
            // In each element at most two numbers that are not 0, rounded once as in the whole.
            ops->add(sum, sum, out);
            OwnedTensor dwpe_of_part = filled(DType::fp32, {T, C}, 0.0);
            ops->encoder_backward(dwte_of_parts->slice(first, rows), dwpe_of_part, dout, tokens, first);
            expect_same_bits(dwpe_of_part, dwpe, "dwpe");
        }
        expect_same_bits(sum, whole, "sum of the parts");
        expect_same_bits(dwte_of_parts, dwte, "dwte");
    }
    OwnedTensor out = garbage(X, {B, T, C});
    EXPECT_NO_THROW(ops->encoder_forward(out, tokens, wte->slice(0, 1), wpe, 100));
    EXPECT_THROW(ops->encoder_forward(out, tokens, wte->slice(0, 1), wpe), ProgrammingError);
    EXPECT_THROW(ops->encoder_forward(out, filled(DType::int32, {B, T}, -1), wte, wpe, 0), ProgrammingError);
}

// ---- copies

TEST(CpuCopy, EveryBitOfEveryDtype) {
    Operations ops;
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64, DType::int32}) {
        for (const std::int64_t n : {0, 1, 13, 10007, 40000}) {
            // All bytes there are, NaNs among them.
            OwnedTensor x(dtype, {n + 1}), y = filled(dtype, {n + 1}, 5.0);
            for (std::size_t i = 0; i < x->bytes(); ++i) x->data[i] = static_cast<std::byte>(i * 37 % 251);
            const OwnedTensor before = copy(y);
            ops->copy(y->flat(0, n), x->flat(0, n).view({1, n}));
            const std::size_t bytes = static_cast<std::size_t>(n) * size_of(dtype);
            EXPECT_EQ(std::memcmp(y->data, x->data, bytes), 0) << name_of(dtype) << " " << n;
            EXPECT_EQ(std::memcmp(y->data + bytes, before->data + bytes, size_of(dtype)), 0)
                << "past the end";
        }
    }
    OwnedTensor out(DType::fp32, {4});
    EXPECT_THROW(ops->copy(out, OwnedTensor(DType::fp32, {3})), ProgrammingError);
    EXPECT_THROW(ops->copy(out, OwnedTensor(DType::int32, {4})), ProgrammingError);
    EXPECT_THROW(ops->copy(out, {}), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuParts, testing::Values(DType::fp32, DType::bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
