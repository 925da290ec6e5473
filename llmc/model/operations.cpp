#include "llmc/model/operations.h"

#include <algorithm>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/model/operation.h"

namespace llmc {

namespace {

// ---- what several rows share

std::int64_t features_of(const Part& part, int value) { return part.value(value).features(); }

// FLOPs of each feature of the first output.
template <int Forward, int Backward>
Work elementwise(const Part& part, const Node& node) {
    const auto features = static_cast<double>(features_of(part, node.out[0]));
    return {.other = Forward * features, .other_backward = Backward * features};
}

// What each rank sends where all gather, or reduce in parts, so many bytes in all.
std::uint64_t gathered_bytes(const Calls& c, const Operand& whole) {
    const auto bytes = static_cast<std::uint64_t>(whole.shape.elements()) * size_of(whole.dtype);
    const auto ranks = static_cast<std::uint64_t>(c.sizes().split.ranks);
    return bytes / ranks * (ranks - 1);
}
std::uint64_t summed_bytes(const Calls& c, const Operand& whole) {
    const auto bytes = static_cast<std::uint64_t>(whole.shape.elements()) * size_of(whole.dtype);
    return all_reduce_bytes(bytes, size_of(whole.dtype), static_cast<std::uint64_t>(c.sizes().split.ranks));
}

void at_least(std::int64_t& size, std::int64_t needed) { size = std::max(size, needed); }
void ask_for_rows(const Part& part, const Node& node, const PartSizes&, WorkspaceRequest& request) {
    at_least(request.channels, features_of(part, node.out[0]));
}
void ask_for_product(const Part& part, const Node& node, const PartSizes&, WorkspaceRequest& request) {
    for (const int value : {node.in[0], node.out[0]})
        at_least(request.largest_matmul_channels, features_of(part, value));
}

constexpr RunCall gather_tokens = [](const Running& r, const Tensor* t) { r.ranks.gather(t[0], t[1]); };
constexpr RunCall sum_addends = [](const Running& r, const Tensor* t) { r.ranks.all_reduce(t[0]); };
constexpr RunCall sum_own_tokens = [](const Running& r, const Tensor* t) {
    r.ranks.reduce_scatter(t[0], t[1]);
};

// ---- embedding

// Of the table, the rank's part begins here; nothing where it has all.
std::optional<std::int64_t> first_row(const TensorParallel& ranks, const Tensor& table) {
    if (!ranks.is_shared()) return std::nullopt;
    return ranks.rank() * table.shape[0];
}

// Each token's row is added by the rank that has it, and the positions by one.
const Operation embedding_row{
    .name = "embedding",
    .forward =
        [](Calls& c) {
            c.call("encoder_forward",
                   [](const Running& r, const Tensor* t) {
                       r.ops.encoder_forward(t[0], t[1], t[2], t[3], first_row(r.ranks, t[2]));
                   },
                   {c.output(0), c.tokens(), c.parameter(0), c.of_one(c.parameter(1))});
        },
    .backward =
        [](Calls& c) {
            c.call("encoder_backward",
                   [](const Running& r, const Tensor* t) {
                       r.ops.encoder_backward(t[0], t[1], t[2], t[3], first_row(r.ranks, t[0]));
                   },
                   {c.parameter_gradient(0), c.parameter_gradient(1), c.gradient(0), c.tokens()});
        },
    .rows =
        [](Calls& c) {
            c.call("encoder_forward",
                   [](const Running& r, const Tensor* t) {
                       const Tensor positions = t[3] ? t[3].slice(r.rows.position, r.rows.count) : t[3];
                       r.ops.encoder_forward(t[0], t[1], t[2], positions, first_row(r.ranks, t[2]));
                   },
                   {c.output(0), c.tokens(), c.parameter(0), c.of_one(c.parameter(1))});
        },
    .work = elementwise<1, 2>,
    .workspace = ask_for_rows};

// ---- normalisation

constexpr RunCall run_layernorm = [](const Running& r, const Tensor* t) {
    r.ops.layernorm_forward(t[0], t[1], t[2], t[3], t[4], t[5]);
};

void call_layernorm_backward(Calls& c, const Operand& din, const Operand& dout, const Operand& in, int mean) {
    c.call("layernorm_backward",
           [](const Running& r, const Tensor* t) {
               r.ops.layernorm_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]);
           },
           {din, c.parameter_gradient(0), c.parameter_gradient(1), dout, in, c.parameter(0).for_input(),
            c.output(mean, Access::read), c.output(mean + 1, Access::read)});
}

const Operation layernorm_row{
    .name = "layernorm",
    .forward =
        [](Calls& c) {
            c.call("layernorm_forward", run_layernorm,
                   {c.output(0), c.output(1), c.output(2), c.read(0), c.parameter(0), c.parameter(1)});
        },
    .backward = [](Calls& c) { call_layernorm_backward(c, c.add_gradient(0), c.gradient(0), c.read(0), 1); },
    .remake = [](Calls& c) { layernorm_row.forward(c); },
    .remade = 0,
    .work = elementwise<8, 16>,
    .workspace = ask_for_rows};

// The sum's gradient, to which the normalisation adds, is that of both addends.
const Operation add_layernorm_row{
    .name = "add_layernorm",
    .forward =
        [](Calls& c) {
            c.call("fused_residual_layernorm_forward",
                   [](const Running& r, const Tensor* t) {
                       r.ops.fused_residual_layernorm_forward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]);
                   },
                   {c.output(0), c.output(1), c.output(2), c.output(3), c.read(0), c.read(1), c.parameter(0),
                    c.parameter(1)});
        },
    .backward =
        [](Calls& c) {
            call_layernorm_backward(c, c.changed_gradient(0).for_input(), c.gradient(1),
                                    c.output(0, Access::read), 2);
            c.pass_gradient(0, 0);
            c.pass_gradient(1, 0);
        },
    .remake =
        [](Calls& c) {
            c.call("layernorm_forward", run_layernorm,
                   {c.output(1), c.output(2), c.output(3), c.output(0, Access::read), c.parameter(0),
                    c.parameter(1)});
        },
    .remade = 1,
    .work = elementwise<9, 16>,
    .workspace = ask_for_rows};

// ---- products

Operand weight_of(Calls& c) {
    const Operand weight = c.parameter(0);
    return weight.as({weight.shape.elements() / weight.shape.last(), weight.shape.last()});
}
// Where each rank makes an addend, one adds the bias.
Operand bias_of(Calls& c) { return c.node().sizes[0] ? c.of_one(c.parameter(1)) : c.parameter(1); }

// The gradient of an input that is an activation is that of what this is of.
void product_backward(Calls& c, int output) {
    const Operand in = c.read(0), weight = weight_of(c);
    const Operand dweight = c.parameter_gradient(0).as(weight.shape), din = c.make_gradient(0).by_token();
    c.call("matmul_backward",
           [](const Running& r, const Tensor* t) {
               r.ops.matmul_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6]);
           },
           {din, dweight, c.parameter_gradient(1), c.gradient(output).by_token(), in.by_token().for_weight(),
            weight.for_input(), c.activated(0).for_input()});
}

constexpr RunCall run_product = [](const Running& r, const Tensor* t) {
    r.ops.matmul_forward(t[0], t[1], t[2], t[3], t[4]);
};

Work product_work(const Part& part, const Node& node) {
    return {.products = 2.0 * static_cast<double>(features_of(part, node.in[0])) *
                        static_cast<double>(features_of(part, node.out[0]))};
}

const Operation product_row{
    .name = "product",
    .forward =
        [](Calls& c) {
            c.call("matmul_forward", run_product,
                   {c.output(0).by_token(), c.read(0).by_token(), weight_of(c), bias_of(c), {}});
        },
    .backward = [](Calls& c) { product_backward(c, 0); },
    .work = product_work,
    .workspace = ask_for_product};

const Operation product_gelu_row{
    .name = "product_gelu",
    .forward =
        [](Calls& c) {
            const Operand pre_gelu = c.output(1).by_token();  // it comes before its GELU
            c.call("matmul_forward", run_product,
                   {c.output(0).by_token(), c.read(0).by_token(), weight_of(c), bias_of(c), pre_gelu});
        },
    .backward = [](Calls& c) { product_backward(c, 0); },
    .remake =
        [](Calls& c) {
            c.call("gelu_forward", [](const Running& r, const Tensor* t) { r.ops.gelu_forward(t[0], t[1]); },
                   {c.output(0), c.output(1, Access::read)});
        },
    .remade = 0,
    .work = product_work,
    .workspace = ask_for_product};

// ---- attention

const Operation attention_row{
    .name = "attention",
    .forward =
        [](Calls& c) {
            c.call("attention_forward",
                   [](const Running& r, const Tensor* t) { r.ops.attention_forward(t[0], t[1], t[2]); },
                   {c.output(0), c.output(1), c.read(0)});
        },
    .backward =
        [](Calls& c) {
            const Operand dout = c.gradient(0).for_input();
            c.call("attention_backward",
                   [](const Running& r, const Tensor* t) {
                       r.ops.attention_backward(t[0], t[1], t[2], t[3], t[4]);
                   },
                   {c.make_gradient(0), dout, c.read(0).for_input(), c.output(0, Access::read).for_input(),
                    c.output(1, Access::read).for_input()});
        },
    .rows =
        [](Calls& c) {
            const Shape qkv = c.read(0).shape;
            c.call("attention_cached_forward",
                   [](const Running& r, const Tensor* t) {
                       // The new rows, or all of them.
                       const std::int64_t made = t[2].shape[1];
                       const Shape heads{made, t[1].shape[2], t[1].shape[3]};
                       r.ops.attention_cached_forward(t[0].view(heads), t[1],
                                                      t[2].view({made, 3, heads[1], heads[2]}),
                                                      r.rows.position + r.rows.count - made);
                   },
                   {c.output(0), c.cache({qkv[1], 2, qkv[3], qkv[4]}), c.read(0)});
        },
    .has_cache = true,
    .work =
        [](const Part& part, const Node& node) {
            return Work{.pairs = 4.0 * static_cast<double>(features_of(part, node.out[0]))};
        },
    .workspace =
        [](const Part& part, const Node& node, const PartSizes& sizes, WorkspaceRequest& request) {
            const Shape& heads = part.value(node.out[0]).shape;  // (T,NH,HS)
            at_least(request.heads, heads[1] / sizes.split.ranks);
            at_least(request.head_size, heads[2]);
        }};

// ---- sums, and what ranks exchange

const Operation add_row{.name = "add",
                        .forward =
                            [](Calls& c) {
                                c.call("add",
                                       [](const Running& r, const Tensor* t) { r.ops.add(t[0], t[1], t[2]); },
                                       {c.output(0), c.read(0), c.read(1)});
                            },
                        .backward =
                            [](Calls& c) {
                                c.pass_gradient(0, 0);
                                c.pass_gradient(1, 0);
                            },
                        .work = elementwise<1, 0>};

const Operation gather_row{
    .name = "gather",
    .forward =
        [](Calls& c) {
            if (!c.divides_tokens()) return c.alias(0, 0);
            const Operand all = c.output(0);
            c.exchange("all_gather", gather_tokens, {all, c.read(0)}, gathered_bytes(c, all));
        },
    .backward =
        [](Calls& c) {
            if (c.divides_tokens()) {
                const Operand addend = c.gradient(0);
                c.exchange("reduce_scatter", sum_own_tokens, {c.own_gradient(0, 0), addend},
                           gathered_bytes(c, addend));
            } else {
                if (c.is_shared()) {
                    const Operand addend = c.changed_gradient(0);
                    c.exchange("all_reduce", sum_addends, {addend}, summed_bytes(c, addend));
                }
                c.pass_gradient(0, 0);
            }
        },
    .remake = [](Calls& c) { gather_row.forward(c); },
    .remade = 0,
    .is_always_remade = true,
    .work = elementwise<0, 0>};

const Operation scatter_row{
    .name = "scatter",
    .forward =
        [](Calls& c) {
            if (!c.is_shared()) return c.alias(0, 0);
            if (c.divides_tokens()) {
                const Operand addend = c.read(0);
                c.exchange("reduce_scatter", sum_own_tokens, {c.own_tokens(0, 0), addend},
                           gathered_bytes(c, addend));
            } else {
                const Operand sum = c.in_place(0, 0);
                c.exchange("all_reduce", sum_addends, {sum}, summed_bytes(c, sum));
            }
        },
    .backward =
        [](Calls& c) {
            if (!c.divides_tokens()) return c.pass_gradient(0, 0);
            const Operand own = c.gradient(0), all = c.make_gradient(0);
            c.exchange("all_gather", gather_tokens, {all, own}, gathered_bytes(c, all));
        },
    .work = elementwise<0, 0>};

// ---- the losses

// Of the vocabulary, the columns that a rank has.
struct Columns {
    std::int64_t first, count;
};
Columns columns_of(const Running& r, const Tensor& table) {
    const std::int64_t stored = table.shape[0], first = r.ranks.rank() * stored;
    return {first, std::clamp<std::int64_t>(r.node->sizes[0] - first, 0, stored)};
}

// Logits are made for a few rows at a time, and with `gradients` turned into these in place: the full (B*T,V) logits never
// exist. Operands: losses, targets, input, table, logits, statistics, all columns; then the gradients of input and table.
template <bool Gradients>
void losses(const Running& r, const Tensor* t) {
    const Tensor input = t[2].rows();
    const Columns columns = columns_of(r, t[3]);
    for (std::int64_t first = 0; first < input.shape[0]; first += t[4].shape[0]) {
        const Tensor logits = t[4].slice(0, std::min(t[4].shape[0], input.shape[0] - first));
        const std::int64_t count = logits.shape[0];
        const Tensor these = input.slice(first, count);
        const Tensor losses = t[0].flat(first, count), targets = t[1].flat(first, count);
        r.ops.matmul_forward(logits, these, t[3], {});
        if (!r.ranks.is_shared()) {
            r.ops.fused_classifier(logits, losses, targets, columns.count, r.loss_scale, Gradients);
        } else {
            const std::int64_t ranks = r.ranks.size();
            const Tensor all = t[5].flat(0, ranks * count * 3).view({ranks, count, 3});
            const Tensor own = all.slice(r.ranks.rank(), 1).view({count, 3});
            r.ops.classifier_statistics(own, logits, targets, columns.count, columns.first);
            r.ranks.gather(all, own);
            r.ops.classifier_from_statistics(logits, losses, all, targets, columns.count, columns.first,
                                             r.loss_scale, Gradients);
        }
        if constexpr (Gradients)
            r.ops.matmul_backward(t[7].rows().slice(first, count), t[8], {}, logits, these, t[3]);
    }
}

// The logits of one row, of all columns in the order of the tokens.
void logits_of_row(const Running& r, const Tensor* t) {
    const Tensor logits = t[4].slice(0, 1);
    r.ops.matmul_forward(logits, t[2].rows(), t[3], {});
    if (r.ranks.is_shared()) r.ranks.gather(t[6].flat(0, t[6].elements()), logits.flat(0, logits.elements()));
}

struct LossOperands {
    Operand losses, input, table, logits, statistics, columns;
};
LossOperands loss_operands(Calls& c) {
    const PartSizes& s = c.sizes();
    const Operand table = c.parameter(0);
    const std::int64_t stored = table.shape[0], R = s.split.ranks;
    return {.losses = c.output(0),
            .input = c.read(0),
            .table = table,
            .logits = c.local("logits", s.dtype, {s.logits_rows, stored}),
            .statistics = R > 1 ? c.local("statistics", DType::fp32, {R, s.logits_rows, 3}) : Operand{},
            .columns = R > 1 ? c.local("all columns", s.dtype, {R, stored}) : Operand{}};
}
std::uint64_t statistics_bytes(const Calls& c, const Operand& losses) {
    const auto ranks = static_cast<std::uint64_t>(c.sizes().split.ranks);
    return static_cast<std::uint64_t>(losses.shape.elements()) * 3 * sizeof(float) * (ranks - 1);
}

const Operation head_loss_row{
    .name = "head_loss",
    .forward =
        [](Calls& c) {
            const LossOperands o = loss_operands(c);
            c.exchange("losses", losses<false>,
                       {o.losses, c.targets(), o.input, o.table, o.logits, o.statistics, o.columns},
                       statistics_bytes(c, o.losses));
        },
    .backward =
        [](Calls& c) {
            const LossOperands o = loss_operands(c);
            c.exchange("losses and gradients", losses<true>,
                       {o.losses, c.targets(), o.input, o.table, o.logits, o.statistics, o.columns,
                        c.make_gradient(0), c.parameter_gradient(0)},
                       statistics_bytes(c, o.losses));
        },
    .rows =
        [](Calls& c) {
            const LossOperands o = loss_operands(c);
            c.call("logits", logits_of_row, {{}, {}, o.input, o.table, o.logits, {}, o.columns});
        },
    .is_forward_in_backward = true,
    .work =
        [](const Part& part, const Node& node) {
            const auto columns = static_cast<double>(node.sizes[0]);
            return Work{.products = 2.0 * static_cast<double>(features_of(part, node.in[0])) * columns};
        },
    .workspace =
        [](const Part& part, const Node& node, const PartSizes& sizes, WorkspaceRequest& request) {
            const ParamSpec& table = part.parameters[static_cast<std::size_t>(node.parameters[0])].spec;
            at_least(request.vocabulary, stored_shape(table, sizes.split.ranks)[0]);
            at_least(request.largest_matmul_channels, request.vocabulary);
        }};

// ---- tracing

Shape with_tokens(const Trace& t, const Shape& features) {
    switch (features.dimensions()) {
        case 1:
            return {t.tokens(), features[0]};
        case 2:
            return {t.tokens(), features[0], features[1]};
        default:
            return {t.tokens(), features[0], features[1], features[2]};
    }
}

Shape with_inputs(const Shape& outputs, std::int64_t inputs) {
    switch (outputs.dimensions()) {
        case 1:
            return {outputs[0], inputs};
        case 2:
            return {outputs[0], outputs[1], inputs};
        default:
            return {outputs[0], outputs[1], outputs[2], inputs};
    }
}

ParamSpec vector_of(const std::string& name, const Shape& shape, double value,
                    std::optional<int> tensor_dim = {}) {
    return {.name = name, .shape = shape, .init = {.mean = value}, .tensor_dim = tensor_dim, .is_bias = true};
}

int add_optional(Trace& t, bool is_there, ParamSpec parameter) {
    return is_there ? t.add(std::move(parameter)) : -1;
}

Value stream(const Trace& t, std::string name, std::string label, std::int64_t width) {
    return {.name = std::move(name), .label = std::move(label), .shape = {t.tokens(), width}};
}
int add_statistic(Trace& t, const std::string& name) {
    return t.add(Value{.name = name, .label = "", .shape = {t.tokens()}, .is_fp32 = true});
}

int trace_product(Trace& t, Node node, const Shape& outputs, const ProductSplit& split, bool has_bias,
                  const Init& init, std::vector<Value> values, const std::string& tied = "") {
    const int x = node.in[0];
    const bool divides_outputs = split.output_dim.has_value();
    t.require(node, x, divides_outputs ? Placement::whole : Placement::divided);
    node.sizes = {divides_outputs ? 0 : 1};
    const ParamSpec weight{.name = tied.empty() ? node.name + ".weight" : tied,
                           .shape = with_inputs(outputs, t[x].features()),
                           .init = init,
                           .tensor_dim = split.output_dim.value_or(outputs.dimensions()),
                           .transposed_in_files = t.transposes_products_in_files};
    node.parameters = {
        t.add(weight, !tied.empty()),
        add_optional(t, has_bias, vector_of(node.name + ".bias", outputs, 0, split.output_dim))};
    for (Value& value : values) {
        value.shape = with_tokens(t, outputs);
        value.placement = divides_outputs ? Placement::divided : Placement::partial;
        value.divided_dim = 1 + split.output_dim.value_or(0);
        value.divided_what = split.what;
        node.out.push_back(t.add(std::move(value)));
    }
    const int out = node.out[0];
    t.add(std::move(node));
    return out;
}

}  // namespace

int embedding(Trace& t, const ParamSpec& table, const std::optional<ParamSpec>& positions) {
    Value sum = stream(t, "embedding", table.name.substr(0, table.name.find('.')), table.shape.last());
    if (positions) sum.label += " + " + positions->name.substr(0, positions->name.find('.'));
    sum.placement = Placement::partial;
    const int out = t.add(std::move(sum));
    const int rows = t.add(table);
    t.add(Node{.operation = &embedding_row,
               .name = table.name,
               .in = {},
               .out = {out},
               .parameters = {rows, positions ? t.add(*positions) : -1}});
    return out;
}

int layernorm(Trace& t, const std::string& name, int x, bool has_bias) {
    const std::int64_t C = t[x].features();
    Node node{.operation = &layernorm_row, .name = name, .in = {x}, .out = {}, .parameters = {}};
    t.require(node, x, Placement::stream);
    node.out = {t.add(stream(t, name, name, C)), add_statistic(t, name + ".mean"),
                add_statistic(t, name + ".rstd")};
    node.parameters = {t.add(vector_of(name + ".weight", {C}, 1)),
                       add_optional(t, has_bias, vector_of(name + ".bias", {C}, 0))};
    const int out = node.out[0];
    t.add(std::move(node));
    return out;
}

AddNorm add_layernorm(Trace& t, const std::string& name, int x, int addend, bool has_bias) {
    const std::int64_t C = t[x].features();
    Node node{.operation = &add_layernorm_row, .name = name, .in = {x, addend}, .out = {}, .parameters = {}};
    for (const int value : node.in) t.require(node, value, Placement::stream);
    if (t[addend].features() != C) t.refuse(node, "adds what has another width");
    node.out = {t.add(stream(t, name + ".sum", t[addend].label, C)), t.add(stream(t, name, name, C)),
                add_statistic(t, name + ".mean"), add_statistic(t, name + ".rstd")};
    node.parameters = {t.add(vector_of(name + ".weight", {C}, 1)),
                       add_optional(t, has_bias, vector_of(name + ".bias", {C}, 0))};
    const AddNorm made{node.out[0], node.out[1]};
    t.add(std::move(node));
    return made;
}

int product(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
            bool has_bias, const Init& init, const std::string& tied) {
    return trace_product(t, {.operation = &product_row, .name = name, .in = {x}, .out = {}, .parameters = {}},
                         outputs, split, has_bias, init, {Value{.name = name, .label = name, .shape = {}}},
                         tied);
}

int product_gelu(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
                 bool has_bias, const Init& init) {
    const std::string activated = name.substr(0, name.find('.')) + ".act";
    const int gelu = trace_product(
        t, {.operation = &product_gelu_row, .name = name, .in = {x}, .out = {}, .parameters = {}}, outputs,
        split, has_bias, init,
        {Value{.name = activated, .label = activated, .shape = {}},
         Value{.name = name, .label = name, .shape = {}}});
    t.set_activation(gelu, gelu + 1);
    return gelu;
}

int attention(Trace& t, const std::string& name, int qkv) {
    Node node{.operation = &attention_row, .name = name, .in = {qkv}, .out = {}, .parameters = {}};
    t.require(node, qkv, Placement::divided, 2);
    const Shape& shape = t[qkv].shape;  // (T,3,NH,HS)
    node.out = {t.add(Value{.name = name,
                            .label = name,
                            .shape = {shape[0], shape[2], shape[3]},
                            .placement = Placement::divided}),
                t.add(Value{.name = name + ".lse",
                            .label = "",
                            .shape = {shape[2], shape[0]},
                            .placement = Placement::divided,
                            .token_dim = 1,
                            .divided_dim = 0,
                            .is_fp32 = true})};
    const int out = node.out[0];
    t.add(std::move(node));
    return out;
}

int add(Trace& t, int a, int b) {
    Node node{.operation = &add_row, .name = t[b].label, .in = {a, b}, .out = {}, .parameters = {}};
    for (const int value : node.in) t.require(node, value, Placement::stream);
    if (t[a].features() != t[b].features()) t.refuse(node, "adds what has another width");
    const int out = t.add(stream(t, t[b].name + ".sum", t[b].label, t[a].features()));
    node.out = {out};
    t.add(std::move(node));
    return out;
}

int gather(Trace& t, int stream) {
    Node node{.operation = &gather_row, .name = t[stream].name, .in = {stream}, .out = {}, .parameters = {}};
    t.require(node, stream, Placement::stream);
    Value all = t[stream];
    all.name += ".gathered";
    all.placement = Placement::whole;
    node.out = {t.add(std::move(all))};
    const int out = node.out[0];
    t.add(std::move(node));
    return out;
}

int scatter(Trace& t, int addend) {
    Node node{.operation = &scatter_row, .name = t[addend].name, .in = {addend}, .out = {}, .parameters = {}};
    t.require(node, addend, Placement::partial);
    Value own = t[addend];
    own.name += ".scattered";
    own.placement = Placement::stream;
    node.out = {t.add(std::move(own))};
    const int out = node.out[0];
    t.add(std::move(node));
    return out;
}

void head_loss(Trace& t, int x, const ParamSpec& table, bool is_tied) {
    Node node{.operation = &head_loss_row,
              .name = "lm_head",
              .in = {x},
              .out = {},
              .parameters = {},
              .sizes = {table.shape[0]}};
    t.require(node, x, Placement::whole);
    if (table.shape.last() != t[x].features()) t.refuse(node, "takes a table of another width");
    node.out = {t.add(Value{.name = "losses",
                            .label = "lm_head",
                            .shape = {t.tokens()},
                            .placement = Placement::whole,
                            .is_fp32 = true})};
    node.parameters = {t.add(table, is_tied)};
    t.add(std::move(node));
}

}  // namespace llmc
