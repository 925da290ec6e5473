// The rows of products in the table of operations, and how they are traced.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "llmc/model/operation_rows.h"
#include "llmc/model/operations.h"

namespace llmc {

namespace {

// A product reads one matrix, or several as one: q, k and v, or gate and up. The node's parameters are first
// the matrices, then their biases. The sizes of a node with several are the number of outputs of a thing (1,
// or the size of a head), then the number of things in each matrix.
int matrices(const Node& node) { return static_cast<int>(std::ssize(node.parameters)) / 2; }

// A rank's rows of matrix i. If there are more ranks than things, each has the whole matrix, and neighbors
// read the same rows.
struct OwnRows {
    std::int64_t first, count;
};
OwnRows own_rows(const Node& node, int i, int rank, int ranks) {
    const std::int64_t size = node.sizes[0];
    const Piece things{.count = node.sizes[static_cast<std::size_t>(i) + 1], .may_repeat = true};
    const bool is_whole = ranks > things.count;
    return {is_whole ? size * things.first_of(rank, ranks) : 0, size * things.of_rank(ranks)};
}
// Whether a rank has rows of a matrix that it does not read, so that those that it reads do not lie together.
bool copies_rows(const Node& node, int ranks) {
    return matrices(node) > 1 && std::ranges::any_of(std::span(node.sizes).subspan(1),
                                                     [&](std::int64_t things) { return ranks > things; });
}

// Calls f(the rank's rows of a whole tensor, the same rows of t[0]) for each of the tensors t[1], t[2], ...
template <class F>
void for_own_rows(const Running& r, const Tensor* t, F&& f) {
    const std::int64_t width = t[0].shape.dimensions() > 1 ? t[0].shape.last() : 1;
    std::int64_t at = 0;
    for (int i = 0; i < matrices(*r.node); ++i) {
        const auto [first, count] = own_rows(*r.node, i, r.ranks.rank(), r.ranks.size());
        f(t[1 + i].flat(first * width, count * width), t[0].flat(at * width, count * width));
        at += count;
    }
}
constexpr RunCall copy_own_rows = [](const Running& r, const Tensor* t) {
    for_own_rows(r, t, [&](const Tensor& own, const Tensor& together) { r.ops.copy(together, own); });
};
constexpr RunCall add_own_rows = [](const Running& r, const Tensor* t) {
    for_own_rows(r, t, [&](const Tensor& own, const Tensor& together) { r.ops.accumulate(own, together); });
};

// The matrices, or the biases, of a product as one operand of the calls of one half of the backward pass.
class Together {
  public:
    // `first` is the place of the first parameter.
    Together(Calls& c, int first) : c_(c), first_(first) {
        const int ranks = c.sizes().split.ranks;
        const Operand one = c.parameter(first);
        is_there_ = one.kind != Operand::Kind::none;
        if (!is_there_) return;
        std::int64_t rows = 0;
        for (int i = 0; i < matrices(c.node()); ++i) {
            const Shape& stored = c.parameter(first + i).shape;
            const bool is_vector = first > 0;
            rows += matrices(c.node()) > 1 ? own_rows(c.node(), i, 0, ranks).count
                                           : stored.elements() / (is_vector ? 1 : stored.last());
        }
        shape_ = first > 0 ? Shape{rows} : Shape{rows, one.shape.last()};
    }

    // The parameters, read in `half`.
    Operand read(std::string_view name, Half half) {
        if (!is_there_) return {};
        Operand one = c_.parameter(first_).as(shape_);
        one.half = half;
        if (!copies()) return one;
        Operand copy = c_.local(name, c_.sizes().dtype, shape_);
        copy.half = half;
        std::vector<Operand> operands = {copy};
        for (int i = 0; i < matrices(c_.node()); ++i) operands.push_back(c_.parameter(first_ + i));
        c_.call("copy", copy_own_rows, std::move(operands));
        copy.access = Access::read;
        return copy;
    }
    // Their gradients, to which a call adds. Call finish_gradient() after it.
    Operand gradient(std::string_view name) {
        if (!is_there_) return {};
        if (!copies()) return c_.parameter_gradient(first_).as(shape_);
        gradient_ = c_.local(name, DType::fp32, shape_).for_weight();
        c_.call("fill", run_zero, {gradient_});
        gradient_.access = Access::add;
        return gradient_;
    }
    void finish_gradient() {
        if (!is_there_ || !copies()) return;
        gradient_.access = Access::read;
        std::vector<Operand> operands = {gradient_};
        for (int i = 0; i < matrices(c_.node()); ++i) operands.push_back(c_.parameter_gradient(first_ + i));
        c_.call("accumulate", add_own_rows, std::move(operands));
    }

  private:
    bool copies() const { return copies_rows(c_.node(), c_.sizes().split.ranks); }

    Calls& c_;
    int first_;
    bool is_there_ = false;
    Shape shape_{};
    Operand gradient_;
};

void call_product(Calls& c, const Operand& pre_gelu) {
    Together weight(c, 0), bias(c, matrices(c.node()));
    Operand added = bias.read("own biases", Half::both);
    // If each rank makes a partial sum, one of them adds the bias.
    if (c.node().takes == Placement::divided) added = c.on_first_rank_only(added);
    const Operand matrix = weight.read("own matrix", Half::both);
    c.call("matmul_forward", run_op<&Ops::matmul_forward>,
           {c.output(0).by_token(), c.read(0).by_token(), matrix, added, pre_gelu});
}
// `out` is the product's own output. If the input is GELU of another value, matmul_backward reads that value
// and computes its gradient directly.
void call_product_backward(Calls& c, int out) {
    Together weight(c, 0), bias(c, matrices(c.node()));
    const Operand in = c.read(0), matrix = weight.read("own matrix", Half::input);
    const Operand dweight = weight.gradient("own matrix's gradient"),
                  dbias = bias.gradient("own biases' gradient"),
                  din = c.make_gradient_before_gelu(0).by_token();
    c.call("matmul_backward", run_op<&Ops::matmul_backward>,
           {din, dweight, dbias, c.gradient(out).by_token(), in.by_token().for_weight(), matrix,
            c.pre_gelu(0).for_input()});
    weight.finish_gradient();
    bias.finish_gradient();
}
void ask_for_product(const Part& part, const Node& node, const PartSizes&, WorkspaceRequest& request) {
    for (const int value : {node.in[0], node.out[0]})
        at_least(request.largest_matmul_channels, features_of(part, value));
}

Work product_work(const Part& part, const Node& node) {
    return {.products = 2.0 * static_cast<double>(features_of(part, node.in[0])) *
                        static_cast<double>(features_of(part, node.out[0]))};
}

const Operation product_row{.name = "product",
                            .forward = [](Calls& c) { call_product(c, {}); },
                            .backward = [](Calls& c) { call_product_backward(c, 0); },
                            .work = product_work,
                            .workspace = ask_for_product};

const Operation product_gelu_row{
    .name = "product_gelu",
    .forward = [](Calls& c) { call_product(c, c.output(1).by_token()); },
    .backward =
        [](Calls& c) {
            if (c.has_gradient(0))
                c.call("gelu_backward", run_op<&Ops::gelu_backward>,
                       {c.make_own_gradient(1), c.gradient(0), c.output(1, Access::read)});
            call_product_backward(c, 1);
        },
    .recompute =
        [](Calls& c) {
            c.call("gelu_forward", run_op<&Ops::gelu_forward>, {c.output(0), c.output(1, Access::read)});
        },
    .recomputed = 0,
    .work = product_work,
    .workspace = ask_for_product};

int trace_product(Trace& t, const Operation& row, const std::string& name, int x, const Shape& outputs,
                  const ProductSplit& split, bool has_bias, const Init& init, const std::string& tied,
                  const std::vector<std::string>& values) {
    const bool divides_outputs = split.output_dim.has_value();
    // Ranks divide the matrix's inputs as one piece, of which each has its own.
    const std::vector<Piece>& inputs = t[x].pieces;
    if (!divides_outputs && (inputs.size() > 1 || std::ranges::any_of(inputs, &Piece::may_repeat)))
        t.refuse({.operation = &row, .name = name},
                 fmt::format("needs an input that ranks divide as one, but {} has several pieces, or pieces "
                             "that ranks share",
                             t[x].name));
    const ParamSpec weight{.name = tied.empty() ? name + ".weight" : tied,
                           .shape = outputs + Shape{t[x].features()},
                           .init = init,
                           .tensor_dim = split.output_dim.value_or(outputs.dimensions()),
                           .transposed_in_files = t.transposes_products_in_files};
    std::vector<Piece> pieces;
    if (divides_outputs && !split.what.empty()) pieces.push_back({outputs[*split.output_dim], split.what});
    std::vector<Value> made;
    for (const std::string& value : values)
        made.push_back({.name = value,
                        .label = value,
                        .shape = Shape{t.tokens()} + outputs,
                        .placement = divides_outputs ? Placement::divided : Placement::partial,
                        .divided_dim = 1 + split.output_dim.value_or(0),
                        .pieces = pieces});
    const int weight_number = t.add(weight, !tied.empty());
    const int bias = t.add_optional(has_bias, vector_of(name + ".bias", outputs, 0, split.output_dim));
    return t.add({.operation = &row,
                  .name = name,
                  .in = {x},
                  .takes = divides_outputs ? Placement::whole : Placement::divided,
                  .parameters = {weight_number, bias}},
                 std::move(made));
}

}  // namespace

int product(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
            bool has_bias, const Init& init, const std::string& tied) {
    return trace_product(t, product_row, name, x, outputs, split, has_bias, init, tied, {name});
}

int product_gelu(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
                 bool has_bias, const Init& init) {
    if (!split.output_dim)
        t.refuse({.operation = &product_gelu_row, .name = name},
                 "makes partial sums, but GELU needs complete sums; divide the product by its outputs");
    const int gelu = trace_product(t, product_gelu_row, name, x, outputs, split, has_bias, init, "",
                                   {unit_of(name) + ".act", name});
    t.set_gelu(gelu, gelu + 1);
    return gelu;
}

int packed_product(Trace& t, const std::string& name, int x, const std::vector<PackedMatrix>& matrices,
                   const Shape& thing, bool has_bias, const Init& init) {
    Node node{.operation = &product_row,
              .name = name,
              .in = {x},
              .takes = Placement::whole,
              .sizes = {thing.elements()}};
    Value made{.name = name, .label = name, .placement = Placement::divided};
    std::vector<ParamSpec> weights, biases;
    std::int64_t all = 0;
    for (const auto& [of, things] : matrices) {
        const Shape outputs = Shape{things.count} + thing;
        const std::int64_t most_ranks = things.may_repeat ? things.count : 0;
        weights.push_back({.name = of + ".weight",
                           .shape = {outputs.elements(), t[x].features()},
                           .init = init,
                           .tensor_dim = 0,
                           .most_ranks = most_ranks,
                           .joins_previous = !weights.empty()});
        biases.push_back(vector_of(of + ".bias", outputs, 0, 0));
        biases.back().most_ranks = most_ranks;
        biases.back().joins_previous = biases.size() > 1;
        made.pieces.push_back(things);
        node.sizes.push_back(things.count);
        all = saturated_sum(all, things.count);
    }
    made.shape = Shape{t.tokens(), all} + thing;
    for (const ParamSpec& weight : weights) node.parameters.push_back(t.add(weight));
    for (const ParamSpec& bias : biases) node.parameters.push_back(t.add_optional(has_bias, bias));
    return t.add(node, {std::move(made)});
}

int qkv_product(Trace& t, const std::string& name, int x, const HeadCounts& heads, std::int64_t head_size,
                bool has_bias, const Init& init) {
    const Piece queries{heads.queries, "heads (--heads)"},
        keys{heads.keys, "heads of keys (--kv-heads)", true};
    return packed_product(t, name + ".qkv", x,
                          {{name + ".q_proj", queries}, {name + ".k_proj", keys}, {name + ".v_proj", keys}},
                          {head_size}, has_bias, init);
}

}  // namespace llmc
