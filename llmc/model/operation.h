// A row of the table of operations (operations*.cpp, head_loss.cpp), and the operands of the calls that it writes
// (draft.h). A call runs an operation of device/ops.h or an exchange between tensor-parallel ranks. placing.cpp decides
// where its operands lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/core/text.h"
#include "llmc/device/ops.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/model/trace.h"

namespace llmc {

// How products in 8 bits choose the scales of their operands (device/fp8.h).
enum class Fp8Scaling : std::uint8_t {
    none,     // Products are in the compute dtype.
    current,  // By the greatest magnitude of the operand that a rank has.
    delayed   // By that of the whole operand in earlier steps.
};
constexpr std::string_view name_of(Fp8Scaling scaling) {
    return name_among(scaling, "none", "current", "delayed");
}

// The operands of a product in 8 bits. With delayed scaling each has two numbers: the greatest magnitude by which it is
// scaled, and the greatest that this step has seen so far.
enum class Fp8Operand : std::uint8_t { input, matrix, gradient };
inline constexpr int fp8_operands = 3;

// The sizes, besides the model's, on which shapes depend.
struct PartSizes {
    TensorSplit split{};
    std::int64_t batch = 1;  // sequences
    DType dtype = DType::fp32;
    Fp8Scaling fp8 = Fp8Scaling::none;  // of the products that may be in 8 bits
    DType fp8_dtype = DType::bf16;      // what they read (DeviceSizes::fp8_dtype)
    std::int64_t logits_rows = 1;       // rows of logits in memory at a time
};

// Tokens [position, position + count) of a sequence, called rows in generation.
struct RowRange {
    std::int64_t position = 0, count = 1;
};

// The context of a call when it runs.
struct Running {
    Ops& ops;
    const TensorParallel& ranks;
    const Node* node;
    float loss_scale;           // gradients are those of loss_scale * (sum of losses)
    RowRange rows;              // for generation
    bool records_amax = false;  // whether products in 8 bits record the greatest magnitudes of their operands
};
using RunCall = void (*)(const Running& running, const Tensor* operands);

// The type of what it returns is the number of tensors among an operation's fields.
inline constexpr auto count_tensors = []<class... Fields>(const Fields&...) {
    return std::integral_constant<std::size_t,
                                  (std::size_t{std::is_same_v<Fields, OperandField<Tensor>>} + ...)>();
};

// Makes an operation whose tensors are its first fields: these are the operands of a call, in their order.
template <class O>
struct InOrder {
    O operator()(const Running&, const Tensor* t) const {
        return [&]<std::size_t... I>(std::index_sequence<I...>) { return O{t[I]...}; }
        (std::make_index_sequence<decltype(std::declval<const O&>().fields(count_tensors))::value>{});
    }
};
// Runs the operation that F makes.
template <class F>
inline constexpr RunCall run_op = [](const Running& r, const Tensor* t) { r.ops.run(F{}(r, t)); };

// The half of the backward pass that needs an operand or, if it is written, makes it.
enum class Half { both, input, weight };

struct Operand {
    enum class Kind : std::uint8_t {
        none,
        storage,
        parameter,
        parameter_gradient,
        tokens,
        targets,
        angles,
        amax
    };
    Kind kind = Kind::none;
    Access access = Access::read;
    Half half = Half::both;
    int index = -1;  // the number of a storage of the draft, or of a parameter or an amax of the part
    // The version of its storage that it leaves, and the one that it reads.
    int version = 0, read_version = 0;
    bool is_own_tokens = false;       // only the part of the storage for the rank's own tokens
    bool on_first_rank_only = false;  // exists on one tensor-parallel rank only
    Shape shape{};                    // on this rank
    DType dtype = DType::fp32;

    // The same elements in another shape.
    Operand as(const Shape& other) const {
        Operand operand = *this;
        operand.shape = other;
        return operand;
    }
    Operand for_input() const { return for_half(Half::input); }
    Operand for_weight() const { return for_half(Half::weight); }
    // (B,T,...) with the other dimensions flattened.
    Operand by_token() const { return as({shape[0], shape[1], shape.elements() / (shape[0] * shape[1])}); }

  private:
    Operand for_half(Half needed) const {
        Operand operand = *this;
        operand.half = needed;
        return operand;
    }
};

// Floating-point operations per token in the forward pass. The backward pass computes two products for each
// product of the forward pass, and five for the two of attention. (The costs in model.h count four for
// attention.)
struct Work {
    double products = 0;  // operations of matrix products
    // Operations of attention, for each pair of a query and a key, if it sees all earlier keys. With a window it
    // sees fewer, and this number is smaller in the same proportion.
    double pairs = 0;
    double other = 0, other_backward = 0;
};

class Calls;  // draft.h

struct Operation {
    std::string_view name;
    void (*forward)(Calls& calls);
    // In a half of the pass, operands of the other half are empty or give only their shape.
    void (*backward)(Calls& calls);
    void (*rows)(Calls& calls) = nullptr;  // a few rows with a cache, if that needs another call
    // Recomputes the output number `recomputed` from the other kept values. If `is_always_recomputed`, that
    // output is never kept.
    void (*recompute)(Calls& calls) = nullptr;
    int recomputed = -1;
    bool is_always_recomputed = false;
    bool may_be_in_fp8 = false;
    bool takes_tokens = false;  // reads the tokens of the batch, which only the first part has
    bool has_cache = false;     // generation keeps the keys and values of its first input
    // its backward pass includes its forward pass, and needs nothing kept
    bool is_forward_in_backward = false;
    Work (*work)(const Part& part, const Node& node) = nullptr;
    // Raises a request to the workspace that it needs.
    void (*workspace)(const Part& part, const Node& node, const PartSizes& sizes,
                      WorkspaceRequest& request) = nullptr;
};

}  // namespace llmc
