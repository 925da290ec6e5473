// The rows of products in the table of operations, and how they are traced.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
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
    const Piece things{.count = node.sizes[static_cast<std::size_t>(i) + 1], .can_be_shared = true};
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
        const auto place = [&](std::int64_t rows) {
            return t[1 + i].dtype == DType::uint8 ? nf4_bytes(rows * width) : rows * width;
        };
        f(t[1 + i].flat(place(first), place(count)), t[0].flat(at * width, count * width));
        at += count;
    }
}
constexpr RunCall copy_own_rows = [](const Running& r, const Tensor* t) {
    for_own_rows(r, t, [&](const Tensor& own, const Tensor& together) { r.ops.run(Copy{together, own}); });
};
constexpr RunCall dequantise_own_rows = [](const Running& r, const Tensor* t) {
    for_own_rows(r, t, [&](const Tensor& own, const Tensor& together) {
        r.ops.run(DequantiseNf4{together, own});
    });
};
constexpr RunCall add_own_rows = [](const Running& r, const Tensor* t) {
    for_own_rows(r, t, [&](const Tensor& own, const Tensor& together) {
        r.ops.run(Add{own, own, together});
    });
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
        is_nf4_ = one.dtype == DType::uint8;
        std::int64_t rows = 0;
        for (int i = 0; i < matrices(c.node()); ++i) {
            const Shape stored = c.shape_of_parameter(first + i);
            const bool is_vector = first > 0;
            rows += matrices(c.node()) > 1 ? own_rows(c.node(), i, 0, ranks).count
                                           : stored.elements() / (is_vector ? 1 : stored.last());
        }
        shape_ = first > 0 ? Shape{rows} : Shape{rows, c.shape_of_parameter(first).last()};
    }

    // The parameters, read in `half`.
    Operand read(std::string_view name, Half half) {
        if (!is_there_) return {};
        Operand one = c_.parameter(first_).as(is_nf4_ ? Shape{nf4_bytes(shape_.elements())} : shape_);
        one.half = half;
        if (!copies() && !is_nf4_) return one;
        Operand copy = c_.local(name, c_.sizes().dtype, shape_);
        copy.half = half;
        if (!copies()) {
            c_.call<DequantiseNf4>({copy, one});
        } else {
            std::vector<Operand> operands = {copy};
            for (int i = 0; i < matrices(c_.node()); ++i) operands.push_back(c_.parameter(first_ + i));
            is_nf4_ ? c_.call("dequantise_nf4", dequantise_own_rows, std::move(operands))
                    : c_.call("copy", copy_own_rows, std::move(operands));
        }
        copy.access = Access::read;
        return copy;
    }
    // Their gradients, to which a call adds. Call finish_gradient() after it.
    Operand gradient(std::string_view name) {
        if (!is_there_ || c_.is_frozen(first_)) return {};
        if (!copies()) return c_.parameter_gradient(first_).as(shape_);
        gradient_ = c_.local(name, DType::fp32, shape_).for_weight();
        c_.call_zero(gradient_);
        gradient_.access = Access::add;
        return gradient_;
    }
    void finish_gradient() {
        if (!is_there_ || !copies() || c_.is_frozen(first_)) return;
        gradient_.access = Access::read;
        std::vector<Operand> operands = {gradient_};
        for (int i = 0; i < matrices(c_.node()); ++i) operands.push_back(c_.parameter_gradient(first_ + i));
        c_.call("accumulate", add_own_rows, std::move(operands));
    }

  private:
    bool copies() const { return copies_rows(c_.node(), c_.sizes().split.ranks); }

    Calls& c_;
    int first_;
    bool is_there_ = false, is_nf4_ = false;
    Shape shape_{};
    Operand gradient_;
};

// ---- products in 8 bits

constexpr RunCall record_amax = [](const Running& r, const Tensor* t) {
    if (r.records_amax) r.ops.run(Amax{t[0], t[1]});
};

template <Fp8 format>
constexpr auto quantise = [](const Running&, const Tensor* t) {
    return Quantise{t[0], t[1], t[2], format};
};
template <Fp8 format>
constexpr auto quantise_to_bytes = [](const Running&, const Tensor* t) {
    return QuantiseToBytes{{t[0], t[1], t[2]}, t[3], t[4], format};
};

// The greatest magnitude by which an operand is scaled. `records`: whether this is the first of its uses in a step,
// where delayed scaling sees the magnitudes for later steps.
Operand amax_of(Calls& c, const Operand& operand, Fp8Operand which, bool records) {
    static constexpr std::array<std::string_view, fp8_operands> names = {
        "amax of its input", "amax of its matrix", "amax of its gradient"};
    if (c.sizes().fp8 == Fp8Scaling::current) {
        Operand amax = c.local(names[static_cast<std::size_t>(which)], DType::fp32, {1});
        amax.half = operand.half;
        c.call_zero(amax);
        amax.access = Access::add;
        c.call<Amax>({amax, operand});
        amax.access = Access::read;
        return amax;
    }
    if (records) {
        Operand recorded = c.amax(which, true);
        recorded.half = operand.half == Half::both ? Half::input : operand.half;
        c.call("amax", record_amax, {recorded, operand});
    }
    return c.amax(which, false);
}

// An operand of a product as the product reads it in `half` of the backward pass: rounded to 8 bits, if products are in
// 8 bits.
Operand in_fp8(Calls& c, Operand operand, Fp8Operand which, bool records, Half half = Half::both) {
    static constexpr std::array<std::string_view, fp8_operands> names = {"input in fp8", "matrix in fp8",
                                                                         "gradient in fp8"};
    if (c.sizes().fp8 == Fp8Scaling::none) return operand;
    operand.half = half;
    const Operand amax = amax_of(c, operand, which, records);
    Operand made = c.local_like(names[static_cast<std::size_t>(which)], operand);
    made.half = half;
    const std::vector<Operand> operands = {made, operand, amax};
    if (which == Fp8Operand::gradient)
        c.call<Quantise>(quantise<Fp8::e5m2>, operands);
    else
        c.call<Quantise>(quantise<Fp8::e4m3>, operands);
    made.access = Access::read;
    return made;
}

// The same for a device whose products read bytes (Fp8Copies).
struct Bytes {
    Operand plain, transposed, inverse;
};
bool reads_bytes(Calls& c) {
    return c.sizes().fp8 != Fp8Scaling::none && c.sizes().fp8_dtype == DType::uint8;
}
// `plain` and `transposed`: the half of the backward pass that reads the copy, if there is one.
Bytes in_bytes(Calls& c, Operand operand, Fp8Operand which, bool records, std::optional<Half> plain,
               std::optional<Half> transposed) {
    struct Names {
        std::string_view plain, transposed, inverse;
    };
    static constexpr std::array<Names, fp8_operands> all = {
        {{"input in fp8", "transposed input in fp8", "inverse scale of its input"},
         {"matrix in fp8", "transposed matrix in fp8", "inverse scale of its matrix"},
         {"gradient in fp8", "transposed gradient in fp8", "inverse scale of its gradient"}}};
    const Names& names = all[static_cast<std::size_t>(which)];
    operand.half = plain && transposed ? Half::both : plain ? *plain : *transposed;
    const Operand amax = amax_of(c, operand, which, records);
    Bytes made{.plain = {}, .transposed = {}, .inverse = c.local(names.inverse, DType::fp32, {1})};
    made.inverse.half = operand.half;
    if (plain) {
        made.plain = c.local_like(names.plain, operand, DType::uint8);
        made.plain.half = *plain;
    }
    if (transposed) {
        const std::int64_t columns = operand.shape.last(), rows = operand.shape.elements() / columns;
        made.transposed = c.local(names.transposed, DType::uint8, {columns, rows});
        made.transposed.half = *transposed;
    }
    const std::vector<Operand> operands = {made.plain, made.transposed, made.inverse, operand, amax};
    if (which == Fp8Operand::gradient)
        c.call<QuantiseToBytes>(quantise_to_bytes<Fp8::e5m2>, operands);
    else
        c.call<QuantiseToBytes>(quantise_to_bytes<Fp8::e4m3>, operands);
    made.plain.access = made.transposed.access = made.inverse.access = Access::read;
    return made;
}

void call_product(Calls& c, const Operand& pre_gelu) {
    Together weight(c, 0), bias(c, matrices(c.node()));
    Operand added = bias.read("own biases", Half::both);
    // If each rank makes a partial sum, one of them adds the bias.
    if (c.node().takes == Placement::divided) added = c.on_first_rank_only(added);
    const Operand matrix = weight.read("own matrix", Half::both), in = c.read(0).by_token(),
                  out = c.output(0).by_token();
    if (reads_bytes(c)) {
        const Bytes matrix_bytes = in_bytes(c, matrix, Fp8Operand::matrix, true, Half::both, {}),
                    in_of = in_bytes(c, in, Fp8Operand::input, true, Half::both, {});
        return c.call<Fp8MatmulForward>(
            [](const Running&, const Tensor* t) {
                return Fp8MatmulForward{t[0], {t[1], {}, t[2]}, {t[3], {}, t[4]}, t[5], t[6]};
            },
            {out, in_of.plain, in_of.inverse, matrix_bytes.plain, matrix_bytes.inverse, added, pre_gelu});
    }
    const Operand rounded_matrix = in_fp8(c, matrix, Fp8Operand::matrix, true),
                  rounded_in = in_fp8(c, in, Fp8Operand::input, true);
    c.call<MatmulForward>({out, rounded_in, rounded_matrix, added, pre_gelu});
}

Operand shape_of(Operand operand) {
    operand.access = Access::shape;
    operand.half = Half::both;
    return operand;
}

// `out` is the product's own output. If the input is GELU of another value, matmul_backward reads that value
// and computes its gradient directly.
void call_product_backward(Calls& c, int out) {
    Together weight(c, 0), bias(c, matrices(c.node()));
    const Operand matrix = weight.read("own matrix", Half::input), dout = c.gradient(out).by_token();
    // Only the gradient of the matrix reads the input.
    const bool is_trained = !c.is_frozen(0);
    const Operand in = is_trained ? c.read(0).by_token().for_weight() : Operand{};
    const auto make_gradients = [&] {
        struct Gradients {
            Operand weight, bias, in;
        };
        return Gradients{weight.gradient("own matrix's gradient"), bias.gradient("own biases' gradient"),
                         c.make_gradient_before_gelu(0).by_token()};
    };
    if (c.sizes().fp8 == Fp8Scaling::none) {
        const auto [dweight, dbias, din] = make_gradients();
        c.call<MatmulBackward>({din, dweight, dbias, dout, in, matrix, c.pre_gelu(0).for_input()});
    } else {
        // Biases are not in 8 bits, nor are their gradients.
        const auto add_to_bias = [&](const Operand& dbias) {
            if (dbias.kind == Operand::Kind::none) return;
            c.call<MatmulBackward>({{}, {}, dbias, dout, {}, shape_of(matrix), {}});
        };
        if (reads_bytes(c)) {
            const Bytes of_matrix = in_bytes(c, matrix, Fp8Operand::matrix, false, {}, Half::input),
                        of_in = is_trained ? in_bytes(c, in, Fp8Operand::input, false, {}, Half::weight)
                                           : Bytes{},
                        of_dout = in_bytes(c, dout, Fp8Operand::gradient, true, Half::input,
                                           is_trained ? std::optional(Half::weight) : std::nullopt);
            const auto [dweight, dbias, din] = make_gradients();
            c.call<Fp8MatmulBackward>(
                [](const Running&, const Tensor* t) {
                    return Fp8MatmulBackward{
                        t[0], t[1], {t[2], t[3], t[4]}, {{}, t[5], t[6]}, {{}, t[7], t[8]}, t[9]};
                },
                {din, dweight, of_dout.plain, of_dout.transposed, of_dout.inverse, of_in.transposed,
                 of_in.inverse, of_matrix.transposed, of_matrix.inverse, c.pre_gelu(0).for_input()});
            add_to_bias(dbias);
        } else {
            const Operand of_matrix = in_fp8(c, matrix, Fp8Operand::matrix, false, Half::input),
                          of_in = is_trained ? in_fp8(c, in, Fp8Operand::input, false, Half::weight) : in,
                          of_dout = in_fp8(c, dout, Fp8Operand::gradient, true);
            const auto [dweight, dbias, din] = make_gradients();
            c.call<MatmulBackward>({din, dweight, {}, of_dout, of_in, of_matrix, c.pre_gelu(0).for_input()});
            add_to_bias(dbias);
        }
    }
    weight.finish_gradient();
    bias.finish_gradient();
}
void ask_for_product(const Part& part, const Node& node, const PartSizes& sizes, WorkspaceRequest& request) {
    for (const int value : {node.in[0], node.out[0]}) {
        at_least(request.largest_matmul_channels, features_of(part, value));
        if (sizes.fp8 == Fp8Scaling::none || !node.operation->may_be_in_fp8) continue;
        request.is_fp8 = true;
        const Value& of = part.value(value);
        const Shape own = own_shape(of, sizes);
        const std::int64_t channels = own.elements() / (own[0] * own[of.token_dim + 1]);
        if (channels % 16 != 0 && request.fp8_odd_channels == 0) {
            request.fp8_odd_channels = channels;
            request.fp8_odd_product = node.name;
        }
    }
}

Work product_work(const Part& part, const Node& node) {
    return {.products = 2.0 * static_cast<double>(features_of(part, node.in[0])) *
                        static_cast<double>(features_of(part, node.out[0]))};
}

const Operation product_row{.name = "product",
                            .forward = [](Calls& c) { call_product(c, {}); },
                            .backward = [](Calls& c) { call_product_backward(c, 0); },
                            .may_be_in_fp8 = true,
                            .work = product_work,
                            .workspace = ask_for_product};

const Operation product_gelu_row{
    .name = "product_gelu",
    .forward = [](Calls& c) { call_product(c, c.output(1).by_token()); },
    .backward =
        [](Calls& c) {
            if (c.has_gradient(0))
                c.call<GeluBackward>({c.make_own_gradient(1), c.gradient(0), c.output(1, Access::read)});
            call_product_backward(c, 1);
        },
    .recompute =
        [](Calls& c) {
            c.call<GeluForward>({c.output(0), c.output(1, Access::read)});
        },
    .recomputed = 0,
    .may_be_in_fp8 = true,
    .work = product_work,
    .workspace = ask_for_product};

int trace_product(Trace& t, const Operation& row, const std::string& name, int x, const Shape& outputs,
                  const ProductSplit& split, bool has_bias, const Init& init, const std::string& tied,
                  const std::vector<std::string>& values) {
    const bool divides_outputs = split.output_dim.has_value();
    // Ranks divide the matrix's inputs as one piece, of which each has its own.
    const std::vector<Piece>& inputs = t[x].pieces;
    if (!divides_outputs && (inputs.size() > 1 || std::ranges::any_of(inputs, &Piece::can_be_shared)))
        t.refuse({.operation = &row, .name = name},
                 fmt::format("needs an input that ranks divide as one, but {} has several pieces, or pieces "
                             "that ranks share",
                             t[x].name));
    // What comes before the divided dimension of the outputs tells matrices apart, such as those of q, k and v.
    int matrices = 1;
    for (int i = 0; i < split.output_dim.value_or(0); ++i) matrices *= static_cast<int>(outputs[i]);
    const ParamSpec weight{.name = tied.empty() ? name + ".weight" : tied,
                           .shape = outputs + Shape{t[x].features()},
                           .init = init,
                           .tensor_dim = split.output_dim.value_or(outputs.dimensions()),
                           .transposed_in_files = t.transposes_products_in_files,
                           .matrices = matrices};
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
        const std::int64_t most_ranks = things.can_be_shared ? things.count : 0;
        weights.push_back({.name = of + ".weight",
                           .shape = {outputs.elements(), t[x].features()},
                           .init = init,
                           .tensor_dim = 0,
                           .most_ranks = most_ranks,
                           .joins_previous = !weights.empty(),
                           .matrices = 1});
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
