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

INSTANTIATE_TEST_SUITE_P(DTypes, CpuParts, testing::Values(DType::fp32, DType::bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
