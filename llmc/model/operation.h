// A row of the table of operations (operations*.cpp, head_loss.cpp), and the interface by which it writes its
// calls. A call runs a function of Ops or an exchange between tensor-parallel ranks. placing.cpp decides
// where its operands lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

#include "llmc/device/ops.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/model/trace.h"

namespace llmc {

// The sizes, besides the model's, on which shapes depend.
struct PartSizes {
    TensorSplit split{};
    std::int64_t batch = 1;  // sequences
    DType dtype = DType::fp32;
    std::int64_t logits_rows = 1;  // rows of logits in memory at a time
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
    float loss_scale;  // gradients are those of loss_scale * (sum of losses)
    RowRange rows;     // for generation
};
using RunCall = void (*)(const Running& running, const Tensor* operands);

// Calls a function of Ops whose arguments are the operands in their order: run_op<&Ops::add>.
template <auto Function, class... Tensors>
constexpr RunCall run_in_order(void (Ops::*)(Tensors...)) {
    return [](const Running& running, const Tensor* operands) {
        [&]<std::size_t... I>(std::index_sequence<I...>) { (running.ops.*Function)(operands[I]...); }
        (std::index_sequence_for<Tensors...>{});
    };
}
template <auto Function>
inline constexpr RunCall run_op = run_in_order<Function>(Function);

enum class Access {
    read,
    write,
    add,   // changes the present values
    shape  // uses only its shape
};
// The half of the backward pass that needs an operand or, if it is written, makes it.
enum class Half { both, input, weight };

struct Operand {
    enum class Kind : std::uint8_t { none, storage, parameter, parameter_gradient, tokens, targets };
    Kind kind = Kind::none;
    Access access = Access::read;
    Half half = Half::both;
    int index = -1;  // the number of a storage of the draft, or of a parameter of the part
    // The version of its storage that it leaves, and the one that it reads.
    int version = 0, read_version = 0;
    bool is_own_tokens = false;  // only the part of the storage for the rank's own tokens
    bool is_of_one = false;      // exists on one tensor-parallel rank only
    Shape shape{};               // on this rank
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

// The interface by which a row writes the calls of one node.
class Calls {
  public:
    virtual ~Calls() = default;

    const Node& node() const { return *node_; }
    const PartSizes& sizes() const { return sizes_; }
    bool divides_tokens() const { return sizes_.split.ranks > 1 && sizes_.split.sequence_parallel; }
    bool is_shared() const { return sizes_.split.ranks > 1; }

    // The node's inputs, outputs and parameters by position. The operand of an absent parameter is empty.
    virtual Operand read(int input) = 0;
    virtual Operand output(int output, Access access = Access::write) = 0;
    virtual Operand parameter(int place) = 0;
    // A parameter that only one rank adds, where each rank makes a partial sum.
    Operand of_one(Operand parameter) const {
        parameter.is_of_one = true;
        return parameter;
    }
    static Operand tokens() { return {.kind = Operand::Kind::tokens, .dtype = DType::int32}; }
    static Operand targets() { return {.kind = Operand::Kind::targets, .dtype = DType::int32}; }
    // The value of which an input is GELU; empty if there is none.
    virtual Operand pre_gelu(int input) = 0;
    // The memory of the first input in training. In generation it is the cache of the keys and values of all
    // tokens of one sequence.
    virtual Operand cache(const Shape& shape) = 0;
    // Memory for this operation only.
    virtual Operand local(std::string_view name, DType dtype, const Shape& shape) = 0;

    // An output that shares memory with an input: unchanged, changed in place, or restricted to the rank's
    // own tokens.
    virtual void alias(int output, int input) = 0;
    virtual Operand in_place(int output, int input) = 0;
    virtual Operand own_tokens(int output, int input) = 0;

    // ---- for the backward pass

    // The complete gradient of an output, to read, or to change in place.
    virtual Operand gradient(int output) = 0;
    virtual Operand changed_gradient(int output) = 0;
    // The same for an output that may have no users; it starts as zero if it has none.
    virtual Operand added_gradient(int output) = 0;
    // The gradient of an input, which the call writes, or to which it adds. The call belongs to the half of
    // the backward pass that makes input gradients.
    virtual Operand make_gradient(int input) = 0;
    virtual Operand add_gradient(int input) = 0;
    // The same for a product: of the value of which the input is GELU, if there is one.
    virtual Operand make_gradient_before_gelu(int input) = 0;
    // For an operation that computes GELU. has_gradient: whether an operation other than a product made the
    // gradient of an output. make_own_gradient: the gradient of another output of this node, which the call
    // writes.
    virtual bool has_gradient(int output) = 0;
    virtual Operand make_own_gradient(int output) = 0;
    // Takes the gradient of an output, or the rank's own tokens of it, as the gradient of an input.
    virtual void pass_gradient(int input, int output) = 0;
    virtual Operand own_gradient(int input, int output) = 0;
    virtual Operand parameter_gradient(int place) = 0;

    virtual void call(std::string_view name, RunCall run, std::initializer_list<Operand> operands) = 0;
    // The same for an exchange between ranks. `bytes` is what each rank sends for all tokens of the batch.
    virtual void exchange(std::string_view name, RunCall run, std::initializer_list<Operand> operands,
                          std::uint64_t bytes) = 0;

  protected:
    explicit Calls(const PartSizes& sizes) : sizes_(sizes) {}
    const Node* node_ = nullptr;
    PartSizes sizes_;
};

// Floating-point operations per token in the forward pass. The backward pass computes two products for each
// product of the forward pass, and five for the two of attention. (The costs in model.h count four for
// attention.)
struct Work {
    double products = 0;  // operations of matrix products
    double pairs = 0;     // those of attention, for each pair of a query and a key that it sees
    double other = 0, other_backward = 0;
};

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
