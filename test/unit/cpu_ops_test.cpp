// Ids that are in no row of a table, and bits that two calls share. test/python/test_ops.py has the results.
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

class CpuOperations : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
};

// ---- embeddings

TEST_P(CpuOperations, EncoderRefusesATokenWithoutARow) {
    const OwnedTensor wte = normal(X, {4, 8}, "wte");
    const OwnedTensor wpe = normal(X, {2, 8}, "wpe");
    OwnedTensor out(X, {1, 2, 8});
    OwnedTensor tokens = filled(DType::int32, {1, 2}, 3);
    Operations ops;
    EXPECT_NO_THROW(ops->run(EncoderForward{out, tokens, wte, wpe}));
    tokens.set(1, 4);
    EXPECT_THROW(ops->run(EncoderForward{out, tokens, wte, wpe}), ProgrammingError);
    tokens.set(1, -1);
    EXPECT_THROW(ops->run(EncoderForward{out, tokens, wte, wpe}), ProgrammingError);
}

// ---- layernorm

TEST_P(CpuOperations, LayernormWithoutBetaHasTheBitsOfZeros) {
    for (const auto& [N, C] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 24}, {13, 5}, {33, 37}, {150, 96}}) {
        const OwnedTensor a = normal(X, {N, C}, "a");
        const OwnedTensor b = normal(X, {N, C}, "b");
        // A gamma of 0 makes zeros of both signs. Adding `zeros` turns them into +0.
        OwnedTensor gamma = normal(X, {C}, "gamma");
        gamma.set(C / 2, 0.0);
        const OwnedTensor zeros = filled(X, {C}, 0.0);
        Operations ops;
        std::vector<std::vector<std::byte>> bits;
        for (const Tensor& beta : {*zeros, Tensor{}}) {
            OwnedTensor residual = garbage(X, {N, C}), out = garbage(X, {N, C}), alone = garbage(X, {N, C});
            OwnedTensor mean = garbage(DType::fp32, {N}), rstd = garbage(DType::fp32, {N});
            ops->run(LayerNormForward{alone, mean, rstd, a, gamma, beta});
            for (const OwnedTensor* result : {&alone, &mean, &rstd}) bits.push_back(result->bytes());
            ops->run(FusedResidualLayerNormForward{residual, out, mean, rstd, a, b, gamma, beta});
            for (const OwnedTensor* result : {&residual, &out, &mean, &rstd}) bits.push_back(result->bytes());
        }
        const auto without = bits.begin() + 7;
        EXPECT_TRUE(std::equal(bits.begin(), without, without, bits.end())) << N << " x " << C;
    }
}

// ---- classifier

TEST_P(CpuOperations, ClassifierRefusesATargetOutsideTheVocabulary) {
    OwnedTensor logits(X, {2, 128});
    OwnedTensor losses(DType::fp32, {2});
    Operations ops;
    EXPECT_THROW(ops->run(FusedClassifier{logits, losses, filled(DType::int32, {2}, 37), 37, 1.0F, true}),
                 ProgrammingError);
    EXPECT_THROW(ops->run(FusedClassifier{logits, losses, filled(DType::int32, {2}, -2), 37, 1.0F, true}),
                 ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuOperations, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
