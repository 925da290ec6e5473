// A part of a model as a list of operations: what a family's functions trace in the order in which a person writes them on
// a board (gpt2.cpp). A trace is the same for every mesh, dtype and batch; part_lists.h derives the rest from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/model/units.h"

namespace llmc {

struct Operation;  // operation.h

// How tensor-parallel ranks hold a value.
enum class Placement {
    stream,   // each has the rows of all tokens; with sequence parallelism those of its own tokens
    whole,    // each has the rows of all tokens
    partial,  // each has an addend of the rows of all tokens
    divided   // each has some features (heads, channels) of the rows of all tokens
};
std::string_view name_of(Placement placement);

// The tensor that an operation makes for the T tokens of a sequence.
struct Value {
    std::string name{};   // in the part: "ln_1", "ln_1.mean"
    std::string label{};  // whose output it is, for a person: "attn.c_proj"; empty: nobody's
    Shape shape{};        // of a sequence, of all ranks together: (T,C), (T,3,NH,HS), (NH,T)
    Placement placement = Placement::stream;
    int token_dim = 0;           // where T is in the shape
    int divided_dim = 1;         // which dimension ranks share, where they do
    std::string divided_what{};  // and what that is, for a person
    bool is_fp32 = false;        // otherwise of the compute dtype
    int gelu_of = -1;            // this one is GELU of that value, whose gradient products of this one make

    std::int64_t features() const {
        Shape of_token = shape;
        of_token.resize(token_dim, 1);
        return of_token.elements();
    }
    bool operator==(const Value&) const = default;
};

// A parameter of a part, by its unit and its place there.
struct PartParameter {
    std::string unit;  // "{}" in it stands for the part's number
    ParamSpec spec;
    bool is_tied = false;  // another part has it too
    // With sequence parallelism the gradients of its unit that each rank has whole are summed over the ranks: of one of them,
    // in this part or another, each makes a part.
    bool sums_unit = false;
    bool operator==(const PartParameter&) const = default;
};

// One use of an operation.
struct Node {
    const Operation* operation = nullptr;
    std::string name{};
    std::vector<int> in{}, out{};  // values
    // How ranks hold its inputs; where they divide them, by which dimension.
    Placement takes = Placement::stream;
    int divided_dim = 1;
    std::vector<int> parameters{};      // of the part; -1: an optional one that is not there
    std::vector<std::int64_t> sizes{};  // what else the operation asks for
    bool operator==(const Node&) const = default;
};

// A part of a model: what runs as one action of a step.
struct Part {
    std::string name;  // "block {}"
    std::string unit;  // of its own parameters, "h.{}"; empty: each parameter's name begins with its unit's
    std::int64_t tokens = 0;  // of a sequence
    std::vector<Value> values;
    std::vector<Node> nodes;
    std::vector<PartParameter> parameters;
    int input = -1;   // the value that comes from the part before; -1: tokens
    int output = -1;  // the value that goes to the part behind; -1: losses

    bool takes_tokens() const { return input < 0; }
    bool makes_losses() const { return output < 0; }
    // Channels of the stream before and behind it; 0: there is none.
    std::int64_t input_width() const { return input < 0 ? 0 : value(input).features(); }
    std::int64_t output_width() const { return output < 0 ? 0 : value(output).features(); }
    const Value& value(int id) const { return values[static_cast<std::size_t>(id)]; }
    bool operator==(const Part&) const = default;
};

// Whether each tensor-parallel rank makes the gradient of what all have whole from its own tokens, with sequence parallelism;
// and whether that of a unit's whole parameters is therefore summed over the ranks.
bool has_partial_gradient(const Part& part, int parameter);
bool sums_replicated(const Part& part, const std::string& unit);

// What operations add themselves to (operations.h).
class Trace {
  public:
    // Of a part behind one whose stream has so many channels, none behind the tokens; of T tokens a sequence.
    Trace(std::string name, std::string unit, std::int64_t tokens, std::int64_t width = 0);

    int input() const { return part_.input; }
    std::int64_t tokens() const { return part_.tokens; }
    const Value& operator[](int value) const { return part_.value(value); }

    // A parameter's number; of an optional one that is not there, that says so.
    int add(ParamSpec parameter, bool is_tied = false);
    int add_optional(bool is_there, ParamSpec parameter) { return is_there ? add(std::move(parameter)) : -1; }
    // The first output's number; the others follow. They have the part's T tokens in their first dimension, unless they say
    // otherwise. A ProgrammingError that names the operation, where ranks do not hold an input as it takes it.
    int add(Node node, std::vector<Value> outputs);
    // The first value is GELU of the second: products of the first make the gradient of the second, and what made the first
    // takes it as its own output's gradient.
    void set_gelu(int value, int of) { part_.values[static_cast<std::size_t>(value)].gelu_of = of; }

    // A ProgrammingError that names the operation.
    [[noreturn]] void refuse(const Node& node, std::string_view why) const;

    bool transposes_products_in_files = false;  // as a family's files have them

    // The part, whose last value is what goes to the next one; nothing does behind the losses.
    Part finish(int output = -1);

  private:
    int add(Value value);
    void require(const Node& node, const Value& given) const;
    Part part_;
};

}  // namespace llmc
