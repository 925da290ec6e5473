// Operands that an operation refuses (sizes(), llmc/device/ops.h), on every device.
#include <gtest/gtest.h>

#include <vector>

#include "llmc/device/counting_ops.h"
#include "test/unit/programming_fault.h"

namespace llmc {
namespace {

// Tensors without memory; `mark` tells them apart.
Tensor tensor(const Shape& shape, DType dtype = DType::fp32, std::uintptr_t mark = 1) {
    return {marked_address(mark), dtype, shape};
}
Heads heads(const Shape& rows, std::int64_t first, std::int64_t count, std::int64_t size) {
    return {tensor(rows), first, count, size};
}

template <class O>
void expect_refused(const O& op, std::string_view what) {
    expect_fault([&] { op.sizes(); }, what);
}

TEST(OpSizes, DTypesAndAbsentOperands) {
    const Tensor rows = tensor({2, 3, 8}), row = tensor({8}), column = tensor({6});
    LayerNormForward norm{rows, column, column, rows, row, row};
    EXPECT_NO_THROW(norm.sizes());
    norm.beta = {};
    EXPECT_NO_THROW(norm.sizes());
    norm.gamma = {};
    expect_refused(norm, "layernorm_forward: gamma is missing");
    norm.gamma = tensor({8}, DType::bf16);
    expect_refused(norm, "layernorm_forward: gamma is bf16, not fp32");
    norm.gamma = row;
    norm.mean = tensor({6}, DType::bf16);
    expect_refused(norm, "layernorm_forward: mean is bf16, not fp32");
    expect_refused(Add{tensor({2}, DType::int32), row, row}, "add: out is int32, not a compute dtype");
    expect_refused(Copy{row, tensor({8}, DType::bf16)}, "a copy has the dtype of its source");
    expect_refused(Cast{row, tensor({7}, DType::bf16)}, "out has 8 elements, not 7");
}

TEST(OpSizes, Embeddings) {
    const Tensor tokens = tensor({1, 2}, DType::int32);
    EXPECT_NO_THROW((EncoderForward{tensor({1, 2, 8}), tokens, tensor({4, 8}), tensor({2, 8})}.sizes()));
    expect_refused(EncoderForward{tensor({1, 2, 8}), tokens, tensor({4, 8}), tensor({1, 8})},
                   "wpe has a row for each position");
    expect_refused(EncoderForward{tensor({1, 3, 8}), tokens, tensor({4, 8})}, "tokens is (1, 2), not (1, 3)");
}

TEST(OpSizes, Norms) {
    const Tensor rows = tensor({2, 8}), row = tensor({8}), column = tensor({2});
    expect_refused(LayerNormBackward{rows, {}, row, rows, rows, row, column, column},
                   "dbeta is computed only together with dgamma");
    expect_refused(RmsNormForward{rows, column, rows, tensor({7}), 1e-5F}, "weight has 7 elements, not 8");
    expect_refused(RmsNormBackward{tensor({2, 7}), {}, rows, rows, row, column},
                   "din is (2, 7), not 2 rows of 8");
}

TEST(OpSizes, Products) {
    const Tensor in = tensor({2, 3, 8}), weight = tensor({5, 8}), out = tensor({2, 3, 5});
    EXPECT_NO_THROW((MatmulForward{out, in, weight}.sizes()));
    expect_refused(MatmulForward{tensor({2, 3, 4}), in, weight}, "out is (2, 3, 4), not 6 rows of 5");
    expect_refused(MatmulForward{out, in, weight, tensor({4})}, "bias has 4 elements, not 5");
    expect_refused(MatmulBackward{in, tensor({5, 7}), {}, out, in, weight},
                   "dweight has 35 elements, not 40");
    expect_refused(MatmulBackward{in, {}, {}, out, in, weight, out},
                   "pre_gelu is (2, 3, 5), not 6 rows of 8");
}

TEST(OpSizes, Heads) {
    const Tensor out = tensor({1, 3, 4, 2}), lse = tensor({1, 4, 3});
    const Heads q = heads({1, 3, 16}, 0, 4, 2), k = heads({1, 3, 16}, 8, 2, 2),
                v = heads({1, 3, 16}, 12, 2, 2);
    EXPECT_NO_THROW((AttentionForward{out, lse, q, k, v}.sizes()));
    expect_refused(AttentionForward{out, lse, q, heads({1, 3, 16}, 8, 3, 2), v},
                   "the number of key heads divides that of the query heads");
    expect_refused(AttentionForward{out, lse, q, k, heads({1, 3, 16}, 13, 2, 2)},
                   "v has 2 heads of 2 from element 13, not inside the rows of (1, 3, 16)");
    expect_refused(AttentionForward{out, lse, q, k, v, -1}, "a window is a number of keys, or 0 for all");
    expect_refused(AttentionBackward{q, k, k, out, q, k, v, out, lse},
                   "the gradients have places of their own");
    expect_refused(AttentionCachedForward{tensor({2, 4, 2}), tensor({5, 2, 2, 2}), heads({2, 16}, 0, 4, 2),
                                          heads({2, 16}, 8, 2, 2), heads({2, 16}, 12, 2, 2), 4},
                   "the cache has room for the rows");
    expect_refused(Rope{heads({2, 7}, 0, 2, 3), tensor({9, 1, 2}), 0, false}, "rope takes heads of pairs");
    expect_refused(Rope{heads({2, 8}, 0, 2, 4), tensor({9, 2, 2}), 8, false},
                   "there are angles for each position");
    HeadNormForward norm{heads({2, 8}, 0, 2, 4), tensor({2, 2}), heads({2, 8}, 0, 2, 4), tensor({4}), 1e-5F};
    EXPECT_NO_THROW(norm.sizes());
    norm.shared = {tensor({2, 2}), 8};
    expect_refused(norm, "ranks share rows of one head");
    norm.shared = {};
    norm.out.size = 2;
    expect_refused(norm, "out has 2 rows of 2 heads of 2 elements, not 2 of 2 of 4");
}

TEST(OpSizes, Classifiers) {
    const Tensor logits = tensor({2, 128}), losses = tensor({2}), targets = tensor({2}, DType::int32);
    EXPECT_NO_THROW((FusedClassifier{logits, losses, targets, 128, 1.0F, true}.sizes()));
    expect_refused(FusedClassifier{logits, losses, targets, 129, 1.0F, true},
                   "the vocabulary lies inside the logits' columns");
    expect_refused(FusedClassifier{logits, losses, targets, 37, 1.0F, true, {.cap = -1}},
                   "the classifier's cap and z-loss are at least 0");
    expect_refused(ClassifierStatistics{tensor({2, 2}), logits, targets, 37, 0},
                   "statistics is (2, 2), not (2, 3)");
    expect_refused(SoftCap{logits, logits, 0}, "a cap is above 0");
}

TEST(OpSizes, Updates) {
    const std::int64_t n = 512;
    const Tensor fp32 = tensor({n}), bf16 = tensor({n}, DType::bf16, 2), bytes = tensor({n}, DType::uint8),
                 norm = tensor({1}, DType::fp64), amax = tensor({2});
    const std::vector<UpdateSegment> all = {{0, n, 0.1}}, overlapping = {{0, 50, 0}, {40, 100, 0}},
                                     outside = {{0, n + 1, 0}}, small = {{0, 100, 0, 0}};
    const UpdateStep step{3, 1e-2, {0.9, 0.95, 1e-8}, 1.0};
    const OptimizerUpdate update{OptimizerKind::adamw, fp32, fp32, fp32, norm, {{{fp32}, {fp32}}}, all, step};
    const auto changed = [&](auto&& change) {
        OptimizerUpdate other = update;
        change(other);
        return other;
    };
    EXPECT_EQ(update.sizes(), n);
    expect_refused(changed([&](OptimizerUpdate& o) { o.segments = overlapping; }),
                   "segments are in increasing order");
    expect_refused(changed([&](OptimizerUpdate& o) { o.segments = outside; }),
                   "segments are in increasing order");
    expect_refused(changed([](OptimizerUpdate& o) { o.step.step = 0; }), "an optimizer's steps count from 1");
    expect_refused(changed([&](OptimizerUpdate& o) { o.parameters = tensor({n}, DType::fp32, 2); }),
                   "without a master copy, the parameters take its place");
    expect_refused(changed([&](OptimizerUpdate& o) { o.parameters = o.master = bf16; }),
                   "without a master copy, parameters are rounded at random");
    expect_refused(changed([](OptimizerUpdate& o) {
                       o.rounding = {1, 0};
                   }),
                   "stochastic rounding is to bf16");
    expect_refused(changed([&](OptimizerUpdate& o) {
                       o.state = {{{bf16}, {bf16}}};
                   }),
                   "state in bf16 is rounded at random");
    expect_refused(changed([&](OptimizerUpdate& o) {
                       o.state = {{{norm}, {norm}}};
                   }),
                   "state is in fp32, bf16 or 8 bits");
    expect_refused(changed([&](OptimizerUpdate& o) { o.state[1] = {}; }),
                   "the optimizer has as many tensors of state");
    expect_refused(changed([&](OptimizerUpdate& o) { o.optimizer = OptimizerKind::lion; }),
                   "the optimizer has as many tensors of state");
    expect_refused(changed([&](OptimizerUpdate& o) { o.state[1].values = bytes; }),
                   "all state is in one dtype");
    expect_refused(changed([&](OptimizerUpdate& o) {
                       o.state = {{{bytes}, {bytes}}};
                   }),
                   "state in 8 bits has the greatest magnitudes of its blocks");
    expect_refused(changed([&](OptimizerUpdate& o) {
                       o.state = {{{bytes, amax, tensor({99})}, {bytes, amax, tensor({99})}}};
                       o.segments = small;
                   }),
                   "a small tensor lies in the buffer of small ones");
    expect_refused(changed([&](OptimizerUpdate& o) {
                       o.parameters = bf16;
                       o.rounding = {1, 2};
                   }),
                   "the buffer's first element has an index that is a multiple of 4");
    expect_refused(Accumulate{fp32, fp32, {1, 0}, 0}, "sums that are rounded at random are in bf16");
    expect_refused(GlobalNormSquared{tensor({1}), tensor({1000})}, "the norm takes whole blocks");
    expect_refused(QuantiseToBytes{{}, bf16, tensor({1}), Fp8::e4m3}, "inverse is missing");
}

}  // namespace
}  // namespace llmc
