// The rows of norms of the residual stream in the table of operations, and how they are traced.
#include <fmt/format.h>

#include <utility>

#include "llmc/model/operation_rows.h"
#include "llmc/model/operations.h"

namespace llmc {

namespace {

void call_layernorm(Calls& c, const Operand& in, int out) {
    c.call<LayerNormForward>(
        {c.output(out), c.output(out + 1), c.output(out + 2), in, c.parameter(0), c.parameter(1)});
}
void call_layernorm_backward(Calls& c, const Operand& din, const Operand& dout, const Operand& in, int mean) {
    c.call<LayerNormBackward>({din, c.parameter_gradient(0), c.parameter_gradient(1), dout, in,
                               c.parameter(0).for_input(), c.output(mean, Access::read),
                               c.output(mean + 1, Access::read)});
}

const Operation layernorm_row{
    .name = "layernorm",
    .forward = [](Calls& c) { call_layernorm(c, c.read(0), 0); },
    .backward = [](Calls& c) { call_layernorm_backward(c, c.add_gradient(0), c.gradient(0), c.read(0), 1); },
    .recompute = [](Calls& c) { call_layernorm(c, c.read(0), 0); },
    .recomputed = 0,
    .work = elementwise<8, 16>,
    .workspace = ask_for_layernorm};

// The sum's gradient, to which the normalisation adds its own, is the gradient of both addends.
const Operation add_layernorm_row{
    .name = "add_layernorm",
    .forward =
        [](Calls& c) {
            c.call<FusedResidualLayerNormForward>({c.output(0), c.output(1), c.output(2), c.output(3),
                                                   c.read(0), c.read(1), c.parameter(0), c.parameter(1)});
        },
    .backward =
        [](Calls& c) {
            call_layernorm_backward(c, c.added_gradient(0).for_input(), c.gradient(1),
                                    c.output(0, Access::read), 2);
            c.pass_gradient(0, 0);
            c.pass_gradient(1, 0);
        },
    .recompute = [](Calls& c) { call_layernorm(c, c.output(0, Access::read), 1); },
    .recomputed = 1,
    .work = elementwise<9, 16>,
    .workspace = ask_for_layernorm};

void call_rmsnorm(Calls& c, const Operand& in, int out) {
    c.call<RmsNormForward>(
        [](const Running& r, const Tensor* t) {
            return RmsNormForward{t[0], t[1], t[2], t[3], static_cast<float>(r.node->numbers[0])};
        },
        {c.output(out), c.output(out + 1), in, c.parameter(0)});
}
void call_rmsnorm_backward(Calls& c, const Operand& din, const Operand& dout, const Operand& in, int rstd) {
    c.call<RmsNormBackward>(
        {din, c.parameter_gradient(0), dout, in, c.parameter(0).for_input(), c.output(rstd, Access::read)});
}

const Operation rmsnorm_row{
    .name = "rmsnorm",
    .forward = [](Calls& c) { call_rmsnorm(c, c.read(0), 0); },
    .backward = [](Calls& c) { call_rmsnorm_backward(c, c.add_gradient(0), c.gradient(0), c.read(0), 1); },
    .recompute = [](Calls& c) { call_rmsnorm(c, c.read(0), 0); },
    .recomputed = 0,
    .work = elementwise<4, 12>,
    .workspace = ask_for_rows};

const Operation add_rmsnorm_row{
    .name = "add_rmsnorm",
    .forward =
        [](Calls& c) {
            c.call<FusedResidualRmsNormForward>(
                [](const Running& r, const Tensor* t) {
                    return FusedResidualRmsNormForward{
                        t[0], t[1], t[2], t[3], t[4], t[5], static_cast<float>(r.node->numbers[0])};
                },
                {c.output(0), c.output(1), c.output(2), c.read(0), c.read(1), c.parameter(0)});
        },
    .backward =
        [](Calls& c) {
            call_rmsnorm_backward(c, c.added_gradient(0).for_input(), c.gradient(1),
                                  c.output(0, Access::read), 2);
            c.pass_gradient(0, 0);
            c.pass_gradient(1, 0);
        },
    .recompute = [](Calls& c) { call_rmsnorm(c, c.output(0, Access::read), 1); },
    .recomputed = 1,
    .work = elementwise<5, 12>,
    .workspace = ask_for_rows};

void check_vectors(const Trace& t, const Node& node) {
    if (t[node.in[0]].shape.dimensions() != 2)
        t.refuse(node, fmt::format("needs a vector for each token, but {} has the shape {}",
                                   t[node.in[0]].name, to_string(t[node.in[0]].shape)));
}

}  // namespace

int layernorm(Trace& t, const std::string& name, int x, bool has_bias) {
    const std::int64_t C = t[x].features();
    const int weight = t.add(vector_of(name + ".weight", {C}, 1));
    const int bias = t.add_optional(has_bias, vector_of(name + ".bias", {C}, 0));
    const Node node{.operation = &layernorm_row, .name = name, .in = {x}, .parameters = {weight, bias}};
    check_vectors(t, node);
    return t.add(node,
                 {stream(t, name, name, C), statistic(t, name + ".mean"), statistic(t, name + ".rstd")});
}

AddNorm add_layernorm(Trace& t, const std::string& name, int x, int addend, bool has_bias) {
    const std::int64_t C = t[x].features();
    const int weight = t.add(vector_of(name + ".weight", {C}, 1));
    const int bias = t.add_optional(has_bias, vector_of(name + ".bias", {C}, 0));
    const Node node{
        .operation = &add_layernorm_row, .name = name, .in = {x, addend}, .parameters = {weight, bias}};
    check_vectors(t, node);
    check_widths(t, node);
    const int sum = t.add(node, {stream(t, name + ".sum", t[addend].label, C), stream(t, name, name, C),
                                 statistic(t, name + ".mean"), statistic(t, name + ".rstd")});
    return {sum, sum + 1};
}

int rmsnorm(Trace& t, const std::string& name, int x, bool has_weight, double eps) {
    const std::int64_t C = t[x].features();
    const Node node{.operation = &rmsnorm_row,
                    .name = name,
                    .in = {x},
                    .parameters = {t.add_optional(has_weight, vector_of(name + ".weight", {C}, 1))},
                    .numbers = {eps}};
    check_vectors(t, node);
    return t.add(node, {stream(t, name, name, C), statistic(t, name + ".rstd")});
}

AddNorm add_rmsnorm(Trace& t, const std::string& name, int x, int addend, bool has_weight, double eps) {
    const std::int64_t C = t[x].features();
    const Node node{.operation = &add_rmsnorm_row,
                    .name = name,
                    .in = {x, addend},
                    .parameters = {t.add_optional(has_weight, vector_of(name + ".weight", {C}, 1))},
                    .numbers = {eps}};
    check_vectors(t, node);
    check_widths(t, node);
    const int sum = t.add(node, {stream(t, name + ".sum", t[addend].label, C), stream(t, name, name, C),
                                 statistic(t, name + ".rstd")});
    return {sum, sum + 1};
}

}  // namespace llmc
