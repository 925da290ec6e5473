#include "llmc/model/low_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/device/nf4.h"
#include "llmc/model/operation_rows.h"

namespace llmc {

namespace {

std::int64_t columns(const Tensor& of) { return of.shape.last(); }

// ---- A x. The node's parameters are the A of the product's adapters, one behind the other; so are their outputs.

Operand all_a(Calls& c) {
    const Operand first = c.parameter(0);
    const auto adapters = std::ssize(c.node().parameters);
    return first.as({adapters * first.shape[0], first.shape[1]});
}

// Comes before the product in the forward pass, and so after it in the backward pass, where it adds to the gradient
// that the product has made.
const Operation low_rank_in_row{
    .name = "low_rank_in",
    .forward =
        [](Calls& c) {
            c.call<MatmulForward>({c.output(0).by_token(), c.read(0).by_token(), all_a(c), {}, {}});
        },
    .backward =
        [](Calls& c) {
            const Operand a = all_a(c), du = c.gradient(0).by_token(), in = c.read(0).by_token().for_weight();
            Operand shape_of_a = a;
            shape_of_a.access = Access::shape;
            c.call<MatmulBackward>(
                {{}, c.parameter_gradient(0).as(a.shape), {}, du.for_weight(), in, shape_of_a, {}});
            c.call<MatmulAdd>(
                [](const Running&, const Tensor* t) {
                    return MatmulAdd{columns_of(t[0], 0, columns(t[0])), columns_of(t[1], 0, columns(t[1])),
                                     columns_of(t[2], 0, columns(t[2]))};
                },
                {c.add_gradient(0).by_token(), du.for_input(), a.for_input()});
        },
    .work =
        [](const Part& part, const Node& node) {
            return Work{.products = 2.0 * static_cast<double>(features_of(part, node.in[0])) *
                                    static_cast<double>(features_of(part, node.out[0]))};
        },
    .workspace =
        [](const Part& part, const Node& node, const PartSizes&, WorkspaceRequest& request) {
            for (const int value : {node.in[0], node.out[0]})
                at_least(request.largest_matmul_channels, features_of(part, value));
        }};

// ---- y + s B u. The node's inputs are y and u; its parameters the B of each of the product's matrices, -1 for one
// without an adapter; its sizes those of the product; its number s.

// Calls f(B's rows of this rank, the first column of y, the first of u) for each adapter. t[0] is y or its gradient,
// t[1] u or its gradient, then come the B, or their gradients.
struct Adapter {
    Tensor b;
    std::int64_t first_y, first_u;
};
template <class F>
void for_each_adapter(const Running& r, const Tensor* t, F&& f) {
    const std::span sizes(r.node->sizes);
    std::int64_t first_y = 0, first_u = 0;
    int adapters = 0;
    for (std::size_t i = 0; i < r.node->parameters.size(); ++i) {
        // A packed product's things are divided, or shared by neighbors, each of which has all of B then.
        const bool is_packed = !sizes.empty();
        const Piece things{.count = is_packed ? sizes[i + 1] : 1, .can_be_shared = true};
        const std::int64_t rows = is_packed ? sizes[0] * things.of_rank(r.ranks.size()) : t[0].shape.last();
        if (r.node->parameters[i] >= 0) {
            const Tensor& whole = t[2 + adapters++];
            const bool is_shared = whole.shape[0] > rows;
            f(Adapter{
                whole.slice(is_shared ? sizes[0] * things.first_of(r.ranks.rank(), r.ranks.size()) : 0, rows),
                first_y, first_u});
            first_u += columns(whole);
        }
        first_y += rows;
    }
}

MatmulAdd product_of(const Running& r, const Heads& out, const Heads& a, const Heads& b) {
    return {.out = out, .a = a, .b = b, .scale = static_cast<float>(r.node->numbers[0])};
}

constexpr RunCall add_products = [](const Running& r, const Tensor* t) {
    for_each_adapter(r, t, [&](const Adapter& of) {
        const std::int64_t rows = of.b.shape[0], R = columns(of.b);
        MatmulAdd add = product_of(r, columns_of(t[0], of.first_y, rows), columns_of(t[1], of.first_u, R),
                                   columns_of(of.b, 0, R));
        add.b_transposed = true;
        r.ops.run(add);
    });
};
constexpr RunCall make_gradient_of_u = [](const Running& r, const Tensor* t) {
    r.ops.run(Fill{t[1], 0.0F});
    for_each_adapter(r, t, [&](const Adapter& of) {
        const std::int64_t rows = of.b.shape[0], R = columns(of.b);
        r.ops.run(product_of(r, columns_of(t[1], of.first_u, R), columns_of(t[0], of.first_y, rows),
                             columns_of(of.b, 0, R)));
    });
};
constexpr RunCall add_gradients_of_b = [](const Running& r, const Tensor* t) {
    for_each_adapter(r, t, [&](const Adapter& of) {
        const std::int64_t rows = of.b.shape[0], R = columns(of.b);
        MatmulAdd add = product_of(r, columns_of(of.b, 0, R), columns_of(t[0], of.first_y, rows),
                                   columns_of(t[1], of.first_u, R));
        add.a_transposed = true;
        r.ops.run(add);
    });
};

template <class F>
std::vector<Operand> with_each_b(Calls& c, std::vector<Operand> operands, F&& operand_of) {
    for (int place = 0; place < std::ssize(c.node().parameters); ++place) {
        if (c.node().parameters[static_cast<std::size_t>(place)] >= 0) operands.push_back(operand_of(place));
    }
    return operands;
}

const Operation low_rank_out_row{
    .name = "low_rank_out",
    .forward =
        [](Calls& c) {
            const Operand u = c.read(1).by_token(), sum = c.in_place(0, 0).by_token();
            c.call(MatmulAdd::name, add_products,
                   with_each_b(c, {sum, u}, [&](int place) { return c.parameter(place); }));
        },
    .backward =
        [](Calls& c) {
            const Operand dy = c.gradient(0).by_token(), u = c.read(1).by_token().for_weight();
            c.call(MatmulAdd::name, make_gradient_of_u,
                   with_each_b(c, {dy.for_input(), c.make_gradient(1).by_token()},
                               [&](int place) { return c.parameter(place).for_input(); }));
            c.call(MatmulAdd::name, add_gradients_of_b, with_each_b(c, {dy.for_weight(), u}, [&](int place) {
                       return c.parameter_gradient(place);
                   }));
            c.pass_gradient(0, 0);
        },
    .work =
        [](const Part& part, const Node& node) {
            double work = 0;
            for (const int parameter : node.parameters) {
                if (parameter >= 0)
                    work +=
                        2.0 * static_cast<double>(
                                  part.parameters[static_cast<std::size_t>(parameter)].spec.shape.elements());
            }
            return Work{.products = work};
        },
    .workspace =
        [](const Part& part, const Node& node, const PartSizes&, WorkspaceRequest& request) {
            for (const int value : node.in)
                at_least(request.largest_matmul_channels, features_of(part, value));
        }};

// ---- the model

// "q" of "self_attn.q_proj.weight", and "self_attn.q_proj"; nothing for other parameters.
struct MatrixName {
    std::string kind, stem;
};
std::optional<MatrixName> matrix_name(std::string_view parameter) {
    constexpr std::string_view weight = ".weight", projection = "_proj";
    if (!parameter.ends_with(weight)) return std::nullopt;
    parameter.remove_suffix(weight.size());
    if (!parameter.ends_with(projection)) return std::nullopt;
    std::string_view kind = parameter.substr(0, parameter.size() - projection.size());
    kind.remove_prefix(kind.rfind('.') + 1);
    if (std::ranges::find(adaptable, kind) == adaptable.end()) return std::nullopt;
    return MatrixName{std::string(kind), std::string(parameter)};
}

class Adapting {
  public:
    Adapting(const Part& part, const LowRank& adapters, std::set<std::string>& adapted)
        : of_(part), adapters_(adapters), adapted_(adapted), made_(part) {}

    Part run() {
        for (PartParameter& parameter : made_.parameters) {
            parameter.spec.is_frozen = true;
            parameter.sums_of_unit = {};
        }
        made_.nodes.clear();
        for (Node node : of_.nodes) {
            for (int& value : node.in) value = current(value);
            std::vector<std::optional<MatrixName>> chosen = chosen_matrices(node);
            if (std::ranges::none_of(chosen, [](const auto& of) { return of.has_value(); })) {
                made_.nodes.push_back(std::move(node));
            } else {
                adapt(node, chosen);
            }
        }
        for (PartParameter& parameter : made_.parameters) {
            for (int i = 0; i < std::ssize(made_.parameters); ++i) {
                if (made_.parameters[static_cast<std::size_t>(i)].unit == parameter.unit)
                    parameter.sums_of_unit.add(partial_gradient(made_, i));
            }
        }
        return std::move(made_);
    }

  private:
    int current(int value) const {
        const auto found = replaced_.find(value);
        return found == replaced_.end() ? value : found->second;
    }

    // By the node's parameters, without its biases.
    std::vector<std::optional<MatrixName>> chosen_matrices(const Node& node) const {
        std::vector<std::optional<MatrixName>> names;
        for (const int parameter : node.parameters) {
            if (parameter < 0) continue;
            const ParamSpec& spec = of_.parameters[static_cast<std::size_t>(parameter)].spec;
            if (spec.matrices == 0) continue;
            std::optional<MatrixName>& name = names.emplace_back(matrix_name(spec.name));
            if (!name || spec.transposed_in_files ||
                std::ranges::find(adapters_.matrices, name->kind) == adapters_.matrices.end())
                name.reset();
        }
        return names;
    }

    int add(Value value) {
        made_.values.push_back(std::move(value));
        return static_cast<int>(made_.values.size()) - 1;
    }

    void adapt(const Node& node, const std::vector<std::optional<MatrixName>>& chosen) {
        const bool divides_outputs = node.takes == Placement::whole;
        const std::int64_t inputs = of_.value(node.in[0]).features(), R = adapters_.rank;
        Node in{.operation = &low_rank_in_row,
                .name = node.name + ".lora_A",
                .in = node.in,
                .takes = node.takes,
                .divided_dim = node.divided_dim};
        Node out{.operation = &low_rank_out_row,
                 .name = node.name + ".lora_B",
                 .takes = of_.value(node.out[0]).placement,
                 .divided_dim = of_.value(node.out[0]).divided_dim,
                 .sizes = node.sizes,
                 .numbers = {adapters_.scale}};
        std::vector<PartParameter> all_b;
        for (std::size_t i = 0; i < chosen.size(); ++i) {
            out.parameters.push_back(-1);
            if (!chosen[i]) continue;
            adapted_.insert(chosen[i]->kind);
            const PartParameter& base = of_.parameters[static_cast<std::size_t>(node.parameters[i])];
            const std::string unit = fmt::format("{}{}", base.unit, lora_unit), &stem = chosen[i]->stem;
            in.parameters.push_back(static_cast<int>(made_.parameters.size()));
            made_.parameters.push_back({unit,
                                        {.name = fmt::format("{}{}", stem, lora_a),
                                         .shape = {R, inputs},
                                         .init = {.bound = 1 / std::sqrt(static_cast<double>(inputs))},
                                         .tensor_dim = divides_outputs ? std::nullopt : std::optional(1),
                                         .joins_previous = in.parameters.size() > 1}});
            all_b.push_back({unit,
                             {.name = fmt::format("{}{}", stem, lora_b),
                              .shape = {base.spec.shape.elements() / inputs, R},
                              .init = {},
                              .tensor_dim = divides_outputs ? std::optional(0) : std::nullopt,
                              .most_ranks = base.spec.most_ranks}});
            out.parameters.back() = static_cast<int>(all_b.size()) - 1;
        }
        for (int& parameter : out.parameters)
            if (parameter >= 0) parameter += static_cast<int>(made_.parameters.size());
        std::ranges::move(all_b, std::back_inserter(made_.parameters));

        const int u = add({.name = in.name,
                           .shape = {made_.tokens, std::ssize(in.parameters) * R},
                           .placement = divides_outputs ? Placement::whole : Placement::partial});
        Value sum = of_.value(node.out[0]);
        sum.name = out.name;
        const int y = node.out[0], adapted = add(std::move(sum));
        in.out = {u};
        out.in = {y, u};
        out.out = {adapted};
        made_.nodes.push_back(std::move(in));
        made_.nodes.push_back(node);
        made_.nodes.push_back(std::move(out));
        replaced_[y] = adapted;
    }

    const Part& of_;
    const LowRank& adapters_;
    std::set<std::string>& adapted_;
    Part made_;
    std::map<int, int> replaced_;  // by the value of a product, the one with its adapters
};

}  // namespace

Model with_adapters(const Model& model, const LowRank& adapters) {
    Model made = model;
    std::set<std::string> adapted;
    const LowRank none;
    for (Model::Run& run : made.runs) {
        for (Part& part : run.parts) part = Adapting(part, run.is_layer ? adapters : none, adapted).run();
    }
    for (const std::string& matrix : adapters.matrices) {
        if (!adapted.contains(matrix))
            user_error(
                "this model ({}) has no {}_proj to adapt; adapters are for the families llama, mistral, "
                "qwen2, qwen3 and olmo2; a file of weights alone needs the options of its model",
                model.description, matrix);
    }
    return made;
}

Model with_nf4(const Model& model, int ranks) {
    Model made = model;
    for (Model::Run& run : made.runs) {
        if (!run.is_layer) continue;
        for (Part& part : run.parts) {
            for (PartParameter& parameter : part.parameters) {
                ParamSpec& spec = parameter.spec;
                if (!spec.is_frozen || spec.matrices == 0) continue;
                const std::int64_t columns = spec.shape.last(), elements = spec.shape.elements();
                if (elements % nf4_block != 0)
                    user_error(
                        "--base-dtype: {} has {} x {} numbers, which are no blocks of {}; leave it out",
                        spec.name, elements / columns, columns, nf4_block);
                // A rank has whole rows, or some columns of each; where it has the whole matrix, it reads some rows.
                const bool has_columns = spec.tensor_dim == spec.shape.dimensions() - 1;
                const std::int64_t at_once = has_columns ? columns / ranks : elements / ranks,
                                   shared = spec.most_ranks > 0 && ranks > spec.most_ranks
                                                ? elements / spec.most_ranks
                                                : at_once;
                if (ranks > 1 && (shared % nf4_block != 0 || (has_columns && columns % nf4_block != 0)))
                    user_error(
                        "--tensor-parallel {} would cut blocks of {} numbers of {}; give a smaller one, or "
                        "leave --base-dtype out",
                        ranks, nf4_block, spec.name);
                spec.is_nf4 = true;
                parameter.unit += nf4_unit;
            }
        }
    }
    return made;
}

std::string without_nf4(const std::string& name) {
    const std::string part = fmt::format("{}.", nf4_unit);
    const std::size_t place = name.find(part);
    return place == std::string::npos ? name : std::string(name).erase(place, nf4_unit.size());
}

}  // namespace llmc
