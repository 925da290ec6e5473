// A part of a model as a list of operations. A family's functions trace it in the order of the forward pass
// (gpt2.cpp). A trace is the same for every mesh, dtype and batch; part_lists.h derives the rest from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/model/rope_angles.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/model/units.h"

namespace llmc {

struct Operation;  // operation.h

// How tensor-parallel ranks hold a value.
enum class Placement {
    // The residual stream. Each has the rows of all tokens; with sequence parallelism, those of its own
    // tokens.
    stream,
    whole,    // Each has the rows of all tokens.
    partial,  // Each has a partial sum for the rows of all tokens.
    divided   // Each has some features (heads, channels) of the rows of all tokens.
};
std::string_view name_of(Placement placement);

// Equal things in the dimension of a value that tensor-parallel ranks divide, such as its heads.
struct Piece {
    std::int64_t count = 0;
    std::string what{};  // in messages: "heads (--heads)"
    // Ranks may be more than the things, if their number is a multiple: neighbors then share one.
    bool can_be_shared = false;

    bool suits(std::int64_t ranks) const {
        return count % ranks == 0 || (can_be_shared && ranks % count == 0);
    }
    std::int64_t of_rank(int ranks) const { return can_be_shared && ranks > count ? 1 : count / ranks; }
    // The first thing of a rank.
    std::int64_t first_of(int rank, int ranks) const {
        return can_be_shared && ranks > count ? rank / (ranks / count) : rank * (count / ranks);
    }
    bool operator==(const Piece&) const = default;
};

// A tensor that an operation computes for the T tokens of a sequence.
struct Value {
    std::string name{};   // In the part: "ln_1", "ln_1.mean".
    std::string label{};  // The operation that outputs it, in messages: "attn.c_proj"; may be empty.
    Shape shape{};        // For one sequence, on all ranks together: (T,C), (T,3,NH,HS), (NH,T).
    Placement placement = Placement::stream;
    int token_dim = 0;    // The dimension of T in the shape.
    int divided_dim = 1;  // The dimension that ranks divide, if they do.
    // They lie one after the other in this dimension, and each rank has its share of each. Empty: one piece
    // without a name.
    std::vector<Piece> pieces{};
    bool is_fp32 = false;  // Otherwise it has the compute dtype.
    // The value of which this one is GELU; -1: none. A product that reads this value computes the gradient of
    // that one directly.
    int gelu_of = -1;

    std::int64_t features() const {
        Shape of_token = shape;
        of_token.resize(token_dim, 1);
        return of_token.elements();
    }
    // The extent of the divided dimension on a rank.
    std::int64_t divided_extent(int ranks) const;
    bool operator==(const Value&) const = default;
};

// Whether tensor-parallel ranks sum the gradients of a unit's replicated tensors. They must if each rank
// makes only a part of at least one of them: from its own tokens, or with its own heads.
struct ReplicatedSums {
    bool with_sequence_parallel = false;
    std::int64_t from_ranks = std::numeric_limits<std::int64_t>::max();  // from so many ranks on

    bool operator()(const TensorSplit& split) const {
        return (with_sequence_parallel && split.sequence_parallel) || split.ranks >= from_ranks;
    }
    void add(const ReplicatedSums& other) {
        with_sequence_parallel = with_sequence_parallel || other.with_sequence_parallel;
        from_ranks = std::min(from_ranks, other.from_ranks);
    }
    bool operator==(const ReplicatedSums&) const = default;
};

// A parameter of a part, by its unit and its name in the unit.
struct PartParameter {
    std::string unit;  // "{}" in it stands for the part's number
    ParamSpec spec;
    bool is_tied = false;           // another part has it too
    ReplicatedSums sums_of_unit{};  // those of its unit
    bool operator==(const PartParameter&) const = default;
};

// One use of an operation.
struct Node {
    const Operation* operation = nullptr;
    std::string name{};
    std::vector<int> in{}, out{};  // Values.
    // How ranks hold its inputs; if divided, the dimension.
    Placement takes = Placement::stream;
    int divided_dim = 1;
    std::vector<int> parameters{};      // In the part; -1: an optional one that is absent.
    std::vector<std::int64_t> sizes{};  // Other sizes that the operation needs.
    std::vector<double> numbers{};      // Other numbers: an epsilon, a cap.
    std::optional<RopeAngles> angles{};
    bool operator==(const Node&) const = default;
};

// A part of a model: it runs as one action of a step.
struct Part {
    std::string name;  // "block {}"
    std::string
        unit;  // the unit of its parameters, "h.{}"; empty: each parameter's name begins with its unit's name
    std::int64_t tokens = 0;  // in a sequence
    std::vector<Value> values;
    std::vector<Node> nodes;
    std::vector<PartParameter> parameters;
    int input = -1;   // the value that comes from the part before; -1: tokens
    int output = -1;  // the value that goes to the part after; -1: losses

    bool takes_tokens() const { return input < 0; }
    bool makes_losses() const { return output < 0; }
    // Channels of the stream before and after it; 0: there is none.
    std::int64_t input_width() const { return input < 0 ? 0 : value(input).features(); }
    std::int64_t output_width() const { return output < 0 ? 0 : value(output).features(); }
    const Value& value(int id) const { return values[static_cast<std::size_t>(id)]; }
    bool operator==(const Part&) const = default;
};

// For which splits each rank computes only a part of the gradient of a parameter that it has whole: that of
// its own tokens, or of its own features.
ReplicatedSums partial_gradient(const Part& part, int parameter);

// Whether a part's backward pass makes anything: not if the part takes tokens and is frozen.
bool has_backward(const Part& part);

// Records operations as they are added (operations.h).
class Trace {
  public:
    // `width` is the number of channels of the input stream; 0 if the input is tokens. `tokens` is T, per
    // sequence.
    Trace(std::string name, std::string unit, std::int64_t tokens, std::int64_t width = 0);

    int input() const { return part_.input; }
    std::int64_t tokens() const { return part_.tokens; }
    const Value& operator[](int value) const { return part_.value(value); }

    // Adds a parameter and returns its number. add_optional returns -1 for one that is absent.
    int add(ParamSpec parameter, bool is_tied = false);
    int add_optional(bool is_there, ParamSpec parameter) { return is_there ? add(std::move(parameter)) : -1; }
    // Adds a node and returns the number of its first output; the others follow. The first dimension of an
    // output is the part's T tokens unless its token_dim says otherwise. Throws a ProgrammingError that names
    // the operation if an input does not have the placement that it takes.
    int add(Node node, std::vector<Value> outputs);
    // Says that `value` is GELU of `of`. Products that read `value` make the gradient of `of`.
    void set_gelu(int value, int of) { part_.values[static_cast<std::size_t>(value)].gelu_of = of; }

    // Throws a ProgrammingError that names the operation.
    [[noreturn]] void refuse(const Node& node, std::string_view why) const;

    bool transposes_products_in_files = false;  // whether the family's files hold weights transposed

    // Returns the part. `output` is the value that goes to the next part; -1 for a part that makes losses.
    Part finish(int output = -1);

  private:
    int add(Value value);
    void require(const Node& node, const Value& given) const;
    Part part_;
};

}  // namespace llmc
