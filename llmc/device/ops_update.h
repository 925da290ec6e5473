// The classifier, the gradient norm, the update, and elementwise operations.
// ops.h has the letters and what all operations have in common.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "llmc/core/tensor.h"
#include "llmc/device/op_fields.h"
#include "llmc/device/sizes.h"
#include "llmc/optim/optimizer.h"

namespace llmc {

// The gradient norm adds sums of squares over blocks of this many elements. The norm then does not depend on
// how a buffer is sharded, if shards are whole blocks.
inline constexpr std::int64_t norm_block_elements = 1024;

// A row with this target has no loss and no gradient.
inline constexpr std::int32_t ignored_target = -1;

// The classifier caps logits x before the softmax, and adds a z-loss to its gradient.
struct ClassifierTerms {
    float cap = 0;     // the softmax is of y = cap tanh(x/cap); 0: of y = x
    float z_loss = 0;  // z: the gradient is that of loss + z lse^2, lse = ln sum_v exp(y_v)
};

struct ClassifierSizes {
    std::int64_t rows, channels, ranks;
};

// The numbers in a row's statistics: maximum, sum, logit.
inline constexpr std::int64_t classifier_statistics_numbers = 3;

// A run of elements of a flat buffer, of one tensor. Elements that no segment covers are padding and are not changed.
struct UpdateSegment {
    std::int64_t begin;
    std::int64_t end;
    double weight_decay;
    std::int64_t in_packed = -1;  // its first element in UpdateState::packed; -1: it has none there
    double rate_factor = 1;       // of the learning rate
};

// A tensor of an optimizer's state. In 8 bits (eight_bit_state.h), it needs the greatest magnitude of each block of 256
// elements, and in fp32 the numbers of tensors that are too small for that. In a block, their elements count as 0.
struct UpdateState {
    Tensor values;    // (n)
    Tensor amax{};    // fp32 (n / eight_bit_block)
    Tensor packed{};  // fp32
};

// Rounds numbers to bf16 up or down at random, not to nearest. The random bits are a pure function of the seed, the
// step and the element's index in the rank's part of the model (device/stochastic_rounding.h).
struct StochasticRounding {
    std::uint64_t seed;
    std::int64_t first_element;  // the index there of the buffer's first element; a multiple of 4
};

// ---- classifier ----

// With a cap, y = cap tanh(x/cap) in fp32 takes the place of each logit x, within a few ulp of the cap. For
// each row n over the first `vocabulary` columns:
//   lse_n = ln sum_v exp(y_nv);  loss_n = lse_n - y_{n,target_n}
// With write_dlogits the logits are overwritten with
//   dlogits_nv = (softmax_nv (1 + 2 z lse_n) - [v = target_n]) scale (1 - (y_nv/cap)^2)
// and with 0 in ignored rows and in the columns from `vocabulary` on. Ignored rows have loss 0. The loss
// leaves the z-loss out. Without a cap, y is x and the last factor is 1. (On GPUs exp(a - b) is
// 2^(log2(e) a - log2(e) b), here and below: an error of u times the greatest |y|.)
//   logits X (N,Vp) in place, losses fp32 (N), targets int32 (N)
struct FusedClassifier {
    static constexpr std::string_view name = "fused_classifier";
    Tensor logits, losses, targets;
    std::int64_t vocabulary;
    float scale;
    bool write_dlogits;
    ClassifierTerms terms{};
    auto fields(const auto& see) const {
        return see(changes("logits", logits), writes("losses", losses, DType::fp32),
                   reads("targets", targets, DType::int32), number("vocabulary", vocabulary),
                   number("scale", scale), number("write_dlogits", write_dlogits), number("cap", terms.cap),
                   number("z_loss", terms.z_loss));
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// The classifier for ranks that share the vocabulary: each holds some columns of the logits, which are
// never gathered. Each rank computes statistics of its columns. The ranks exchange these, and each
// finishes its own columns. A rank holds columns [first_column, first_column + columns) of the
// vocabulary, perhaps none. They are the first columns of its logits, which are padded to Vp columns.

// Statistics of each row over the columns y_v of this rank, which are capped as above:
//   maximum = max_v y_v;  sum = sum_v exp(y_v - maximum);  logit = y_target if this rank has that column, else 0
// They are -infinity, 0, 0 in ignored rows and on a rank without columns.
//   statistics fp32 (N,3), logits X (N,Vp), targets int32 (N), indices into the whole vocabulary
struct ClassifierStatistics {
    static constexpr std::string_view name = "classifier_statistics";
    Tensor statistics, logits, targets;
    std::int64_t columns, first_column;
    ClassifierTerms terms{};
    auto fields(const auto& see) const {
        return see(writes("statistics", statistics, DType::fp32), reads("logits", logits),
                   reads("targets", targets, DType::int32), number("columns", columns),
                   number("first_column", first_column), number("cap", terms.cap),
                   number("z_loss", terms.z_loss));
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// Losses and gradients from the statistics maximum_r, sum_r, logit_r of all ranks r. M is the greatest
// maximum_r, S the sum over r of (sum_r exp(maximum_r - M)), and L the sum over r of logit_r, both added
// in the order of the ranks:
//   lse_n = ln S + M;  loss_n = lse_n - L;  with write_dlogits,
//   dlogits_nv = (exp(y_v - M) / S (1 + 2 z lse_n) - [v = target_n]) scale (1 - (y_v/cap)^2)
// The gradients overwrite the logits, with 0 in ignored rows and in the columns from `columns` on.
// Ignored rows have loss 0.
//   logits X (N,Vp) in place; losses fp32 (N), the same on every rank; all_statistics fp32 (R,N,3) of all ranks;
//   targets int32 (N)
struct ClassifierFromStatistics {
    static constexpr std::string_view name = "classifier_from_statistics";
    Tensor logits, losses, all_statistics, targets;
    std::int64_t columns, first_column;
    float scale;
    bool write_dlogits;
    ClassifierTerms terms{};
    auto fields(const auto& see) const {
        return see(
            changes("logits", logits), writes("losses", losses, DType::fp32),
            reads("all_statistics", all_statistics, DType::fp32), reads("targets", targets, DType::int32),
            number("columns", columns), number("first_column", first_column), number("scale", scale),
            number("write_dlogits", write_dlogits), number("cap", terms.cap), number("z_loss", terms.z_loss));
    }
    ClassifierSizes sizes() const;
    OpCost cost() const;
};

// out = cap tanh(x/cap), the classifier's cap alone, with cap > 0; out may be in
//   out, in X, of one shape, any number of elements at any address
struct SoftCap {
    static constexpr std::string_view name = "soft_cap";
    Tensor out, in;
    float cap;
    auto fields(const auto& see) const {
        return see(writes("out", out), reads("in", in), number("cap", cap));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// ---- norm and update ----

// partials_k = sum of x_i^2 over the k-th block of norm_block_elements
//   partials fp32 (n / norm_block_elements), x X (n), n a multiple of norm_block_elements
struct GlobalNormSquared {
    static constexpr std::string_view name = "global_norm_squared";
    Tensor partials, x;
    auto fields(const auto& see) const {
        return see(writes("partials", partials, DType::fp32), reads("x", x));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out += sum_i x_i, in fp64, in an order that depends only on the number of elements.
//   out fp64 (1), x fp32, any shape
struct Sum {
    static constexpr std::string_view name = "sum";
    Tensor out, x;
    auto fields(const auto& see) const {
        return see(changes("out", out, DType::fp64), reads("x", x, DType::fp32));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// A step of an optimizer (llmc/optim): its formula for each element, with g = clip/S gradient for the loss scale S,
// norm = sqrt(norm_squared)/S and clip = min(1, max_grad_norm / (norm + 1e-6)).
// w is the master copy in fp32. `parameters` receives it rounded to X: to nearest, or at random if `rounding` is given,
// with the same bits on every device. Without a master copy, w is read from the parameters. State in bf16 is rounded at
// random as well: to nearest, it would stay what it is where a step changes it by less than 2^-9. If norm_squared is
// not finite, nothing is changed.
//   parameters X (n); master fp32 (n), or `parameters` itself if X is fp32 or X is bf16 with `rounding`;
//   the formula's state fp32 or bf16 (n), or uint8 (n, a multiple of 256) with amax; gradients fp32, bf16 or X (n);
//   norm_squared fp64 (1); segments in increasing order;
//   rounding [optional] only if X is bf16; rounding_of_state with state in bf16
struct OptimizerUpdate {
    static constexpr std::string_view name = "optimizer_update";
    OptimizerKind optimizer;
    Tensor parameters, master, gradients, norm_squared;
    std::array<UpdateState, most_states> state;
    std::span<const UpdateSegment> segments;
    UpdateStep step;
    std::optional<StochasticRounding> rounding{}, rounding_of_state{};
    auto fields(const auto& see) const {
        const auto& [first, second] = state;
        return see(number("optimizer", optimizer), writes("parameters", parameters),
                   changes("master", master, any_dtype),
                   of_variant(changes("state1", first.values, any_dtype)),
                   of_variant(changes("state2", second.values, any_dtype)),
                   reads("gradients", gradients, any_dtype), reads("norm_squared", norm_squared, DType::fp64),
                   of_variant(changes("amax1", first.amax, DType::fp32)),
                   of_variant(changes("amax2", second.amax, DType::fp32)),
                   of_variant(changes("packed1", first.packed, DType::fp32)),
                   of_variant(changes("packed2", second.packed, DType::fp32)), number("segments", segments),
                   number("step", step.step), number("learning_rate", step.learning_rate),
                   number("numbers", step.numbers), number("max_grad_norm", step.max_grad_norm),
                   number("loss_scale", step.loss_scale), number("rounding", rounding),
                   number("rounding_of_state", rounding_of_state));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// ---- Muon (optim/muon.h) ----

// state = mu state + (1 - mu) g;  out = mu state + (1 - mu) g, with g as above and mu = numbers[0] of the step. State
// in bf16 is rounded at random. If norm_squared is not finite, nothing is changed.
//   out X (n); state fp32 or bf16 (n); gradients fp32 or bf16 (n); norm_squared fp64 (1); segments in increasing order;
//   rounding_of_state [optional] with state in bf16
struct Momentum {
    static constexpr std::string_view name = "momentum";
    Tensor out, state, gradients, norm_squared;
    std::span<const UpdateSegment> segments;
    UpdateStep step;
    std::optional<StochasticRounding> rounding_of_state{};
    auto fields(const auto& see) const {
        return see(changes("out", out), changes("state", state, any_dtype),
                   reads("gradients", gradients, any_dtype), reads("norm_squared", norm_squared, DType::fp64),
                   number("segments", segments), number("step", step.step), number("numbers", step.numbers),
                   number("max_grad_norm", step.max_grad_norm), number("loss_scale", step.loss_scale),
                   number("rounding_of_state", rounding_of_state));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// Copies a matrix, or its transpose: row i of `in` begins at element i in_stride, and row j of `out`, or column i of
// `in`, at element j out_stride.
//   out, in X, with room for these rows; they do not overlap
struct CopyMatrix {
    static constexpr std::string_view name = "copy_matrix";
    Tensor out, in;
    std::int64_t rows, columns;  // of `in`
    std::int64_t out_stride, in_stride;
    bool transposed = false;
    auto fields(const auto& see) const {
        return see(changes("out", out), reads("in", in), number("rows", rows), number("columns", columns),
                   number("out_stride", out_stride), number("in_stride", in_stride),
                   number("transposed", transposed));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = (a x + b y) s, in fp32 and rounded once. Without norm_squared, s is 1; with it, 1/max(sqrt(norm_squared),
// 1e-7).
//   out, x, y X, of one number of elements, at any address; y [optional]: 0; out may be x or y
struct Combine {
    static constexpr std::string_view name = "combine";
    Tensor out, x, y;
    float a = 1, b = 0;
    Tensor norm_squared{};  // fp64 (1)
    auto fields(const auto& see) const {
        return see(writes("out", out), reads("x", x), of_variant(reads("y", y)), number("a", a),
                   number("b", b), of_variant(reads("norm_squared", norm_squared, DType::fp64)));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// ---- elementwise ----

// out = in, between compute dtypes
struct Cast {
    static constexpr std::string_view name = "cast";
    Tensor out, in;
    auto fields(const auto& see) const {
        return see(writes("out", out, any_dtype), reads("in", in, any_dtype));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = in, bit for bit; any dtype
//   out, in of one dtype and number of elements, which do not overlap
struct Copy {
    static constexpr std::string_view name = "copy";
    Tensor out, in;
    auto fields(const auto& see) const {
        return see(writes("out", out, any_dtype), reads("in", in, any_dtype));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = value; any dtype (fp64 on GPUs: only the value 0)
struct Fill {
    static constexpr std::string_view name = "fill";
    Tensor out;
    float value;
    auto fields(const auto& see) const { return see(writes("out", out, any_dtype), number("value", value)); }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = a + b in X; out may be a or b
struct Add {
    static constexpr std::string_view name = "add";
    Tensor out, a, b;
    auto fields(const auto& see) const { return see(writes("out", out), reads("a", a), reads("b", b)); }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out += in, rounded at random: to nearest, a sum of many terms would stop growing once a term is below half of
// its last bit. `count` tells the sums of an element apart (stochastic_rounding.h).
//   out bf16, in fp32 or bf16, any shape
struct Accumulate {
    static constexpr std::string_view name = "accumulate";
    Tensor out, in;
    StochasticRounding rounding;
    std::int64_t count;
    auto fields(const auto& see) const {
        return see(changes("out", out), reads("in", in, any_dtype), number("rounding", rounding),
                   number("count", count));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// flag = 1 if no element is NaN or infinite, else 0
//   flag int32 (1)
struct AllFinite {
    static constexpr std::string_view name = "all_finite";
    Tensor flag, x;
    auto fields(const auto& see) const { return see(writes("flag", flag, DType::int32), reads("x", x)); }
    std::int64_t sizes() const;
    OpCost cost() const;
};

}  // namespace llmc
