// The rows of products in the table of operations, and how they are traced.
#include <utility>
#include <vector>

#include "llmc/model/operation_rows.h"
#include "llmc/model/operations.h"

namespace llmc {

namespace {

Operand weight_of(Calls& c) {
    const Operand weight = c.parameter(0);
    return weight.as({weight.shape.elements() / weight.shape.last(), weight.shape.last()});
}
void call_product(Calls& c, const Operand& pre_gelu) {
    // If each rank makes a partial sum, one of them adds the bias.
    const bool makes_addend = c.node().takes == Placement::divided;
    c.call("matmul_forward", run_op<&Ops::matmul_forward>,
           {c.output(0).by_token(), c.read(0).by_token(), weight_of(c),
            makes_addend ? c.of_one(c.parameter(1)) : c.parameter(1), pre_gelu});
}
// `out` is the product's own output. If the input is GELU of another value, matmul_backward reads that value
// and computes its gradient directly.
void call_product_backward(Calls& c, int out) {
    const Operand in = c.read(0), weight = weight_of(c);
    const Operand dweight = c.parameter_gradient(0).as(weight.shape),
                  din = c.make_gradient_before_gelu(0).by_token();
    c.call("matmul_backward", run_op<&Ops::matmul_backward>,
           {din, dweight, c.parameter_gradient(1), c.gradient(out).by_token(), in.by_token().for_weight(),
            weight.for_input(), c.pre_gelu(0).for_input()});
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
    const ParamSpec weight{.name = tied.empty() ? name + ".weight" : tied,
                           .shape = outputs + Shape{t[x].features()},
                           .init = init,
                           .tensor_dim = split.output_dim.value_or(outputs.dimensions()),
                           .transposed_in_files = t.transposes_products_in_files};
    std::vector<Value> made;
    for (const std::string& value : values)
        made.push_back({.name = value,
                        .label = value,
                        .shape = Shape{t.tokens()} + outputs,
                        .placement = divides_outputs ? Placement::divided : Placement::partial,
                        .divided_dim = 1 + split.output_dim.value_or(0),
                        .divided_what = split.what});
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

}  // namespace llmc
