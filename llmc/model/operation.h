// A row of the table of operations (operations.cpp, head_loss.cpp), and what a row writes its calls with. A call is one of Ops or of the
// tensor-parallel ranks; derive_lists.cpp and place_calls.cpp decide where its operands lie.
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

// What shapes depend on, beside the model.
struct PartSizes {
    TensorSplit split{};
    std::int64_t batch = 1;  // sequences
    DType dtype = DType::fp32;
    std::int64_t logits_rows = 1;  // that are held at a time
};

// Of a sequence: [position, position + count).
struct RowRange {
    std::int64_t position = 0, count = 1;
};

// What a call finds when it runs.
struct Running {
    Ops& ops;
    const TensorParallel& ranks;
    const Node* node;
    float loss_scale;  // gradients are those of loss_scale * (sum of losses)
    RowRange rows;     // of generation
};
using RunCall = void (*)(const Running& running, const Tensor* operands);

// The call of a function of Ops whose arguments are the operands in their order: run_op<&Ops::add>.
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
    add,   // changes what is there
    shape  // takes its shape alone
};
// Which part of the backward pass needs an operand or, for what is written, makes it.
enum class Makes { both, input, weight };

struct Operand {
    enum class Kind : std::uint8_t { none, storage, parameter, parameter_gradient, tokens, targets };
    Kind kind = Kind::none;
    Access access = Access::read;
    Makes makes = Makes::both;
    int index = -1;  // of a storage of the draft, or of a parameter of the part
    int version = 0;
    bool is_own_tokens = false;  // of the storage, what the rank's own tokens have
    bool is_of_one = false;      // there on one tensor-parallel rank alone
    Shape shape{};               // on this rank
    DType dtype = DType::fp32;

    // The same elements in another shape.
    Operand as(const Shape& other) const {
        Operand operand = *this;
        operand.shape = other;
        return operand;
    }
    Operand for_input() const { return made_for(Makes::input); }
    Operand for_weight() const { return made_for(Makes::weight); }
    // (B,T,...) with the rest flattened.
    Operand by_token() const { return as({shape[0], shape[1], shape.elements() / (shape[0] * shape[1])}); }

  private:
    Operand made_for(Makes part) const {
        Operand operand = *this;
        operand.makes = part;
        return operand;
    }
};

// What a row writes the calls of one node with.
class Calls {
  public:
    virtual ~Calls() = default;

    const Node& node() const { return *node_; }
    const PartSizes& sizes() const { return sizes_; }
    bool divides_tokens() const { return sizes_.split.ranks > 1 && sizes_.split.sequence_parallel; }
    bool is_shared() const { return sizes_.split.ranks > 1; }

    // The node's inputs, outputs and parameters by their places; an empty operand where a parameter is not there.
    virtual Operand read(int input) = 0;
    virtual Operand output(int output, Access access = Access::write) = 0;
    virtual Operand parameter(int place) = 0;
    // Added on one of the ranks, where each makes an addend.
    Operand of_one(Operand parameter) const {
        parameter.is_of_one = true;
        return parameter;
    }
    static Operand tokens() { return {.kind = Operand::Kind::tokens, .dtype = DType::int32}; }
    static Operand targets() { return {.kind = Operand::Kind::targets, .dtype = DType::int32}; }
    // The value that an input is GELU of; empty where it is of none.
    virtual Operand pre_gelu(int input) = 0;
    // Where the first input is kept, for the keys and values of all rows, of one sequence.
    virtual Operand cache(const Shape& shape) = 0;
    // Memory of the operation's own.
    virtual Operand local(std::string_view name, DType dtype, const Shape& shape) = 0;

    // An output that is an input, as it is, changed in place or what the rank's own tokens have of it.
    virtual void alias(int output, int input) = 0;
    virtual Operand in_place(int output, int input) = 0;
    virtual Operand own_tokens(int output, int input) = 0;

    // ---- of the backward pass

    // The gradient of an output, which is whole by now; and as it is changed in place.
    virtual Operand gradient(int output) = 0;
    virtual Operand changed_gradient(int output) = 0;
    // The same of an output that nothing may use: zero to begin with, if nothing does.
    virtual Operand added_gradient(int output) = 0;
    // That of an input, which the call writes, or adds to. The call makes it for the gradient of the part's input.
    virtual Operand make_gradient(int input) = 0;
    virtual Operand add_gradient(int input) = 0;
    // That of an input is that of an output, or what the rank's own tokens have of it.
    virtual void pass_gradient(int input, int output) = 0;
    virtual Operand own_gradient(int input, int output) = 0;
    virtual Operand parameter_gradient(int place) = 0;

    virtual void call(std::string_view name, RunCall run, std::initializer_list<Operand> operands) = 0;
    // The same of what ranks exchange; `bytes` is what each sends of it, for all tokens of the batch.
    virtual void exchange(std::string_view name, RunCall run, std::initializer_list<Operand> operands,
                          std::uint64_t bytes) = 0;

  protected:
    explicit Calls(const PartSizes& sizes) : sizes_(sizes) {}
    const Node* node_ = nullptr;
    PartSizes sizes_;
};

// Floating-point operations of a token, in the forward pass. In the backward pass there are two products for each, and five of
// attention for its two.
struct Work {
    double products = 0;  // of matrix products
    double pairs = 0;     // of each key that a query sees
    double other = 0, other_backward = 0;
};

struct Operation {
    std::string_view name;
    void (*forward)(Calls& calls);
    void (*backward)(Calls& calls);  // what depends on `Makes` is left out where only one part of it is made
    void (*rows)(Calls& calls) = nullptr;  // a few rows behind a cache, where these take another call
    // Writes an output once more, of what is kept beside it: which one, and whether it is never kept.
    void (*remake)(Calls& calls) = nullptr;
    int remade = -1;
    bool is_always_remade = false;
    bool has_cache = false;               // generation keeps its first input's keys and values
    bool is_forward_in_backward = false;  // what its backward needs is not kept: it includes the forward
    Work (*work)(const Part& part, const Node& node) = nullptr;
    // Raises what it asks of a device.
    void (*workspace)(const Part& part, const Node& node, const PartSizes& sizes,
                      WorkspaceRequest& request) = nullptr;
};

}  // namespace llmc
