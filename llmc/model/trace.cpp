// Records the operations of a part, and checks that each gets its inputs as it takes them.
#include "llmc/model/trace.h"

#include <algorithm>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/model/operation.h"

namespace llmc {

std::string_view name_of(Placement placement) {
    return name_among(placement, "the residual stream", "whole", "a partial sum", "divided");
}

std::int64_t Value::divided_extent(int ranks) const {
    if (pieces.empty()) return shape[divided_dim] / ranks;
    std::int64_t all = 0, own = 0;
    for (const Piece& piece : pieces) {
        all = saturated_sum(all, piece.count);
        own = saturated_sum(own, piece.of_rank(ranks));
    }
    return saturated_product(shape[divided_dim] / all, own);
}

ReplicatedSums partial_gradient(const Part& part, int parameter) {
    const ParamSpec& spec = part.parameters[static_cast<std::size_t>(parameter)].spec;
    const std::int64_t replicated_from = spec.replicated_from();
    ReplicatedSums sums;
    if (spec.is_frozen) return sums;
    for (const Node& node : part.nodes) {
        if (std::ranges::find(node.parameters, parameter) == node.parameters.end()) continue;
        const Placement made = part.value(node.out[0]).placement;
        if (made == Placement::stream) sums.add({.with_sequence_parallel = replicated_from == 2});
        // Each rank has its features of the gradient, or its part of the sum that is the gradient of a whole value, or
        // the partial sums that the operation reads.
        const bool reads_partial = std::ranges::any_of(
            node.in, [&](int value) { return part.value(value).placement == Placement::partial; });
        if (made == Placement::divided || made == Placement::whole || reads_partial)
            sums.add({.from_ranks = replicated_from});
    }
    return sums;
}

bool has_backward(const Part& part) {
    return !part.takes_tokens() ||
           std::ranges::any_of(part.parameters, [](const PartParameter& of) { return !of.spec.is_frozen; });
}

Trace::Trace(std::string name, std::string unit, std::int64_t tokens, std::int64_t width) {
    part_.tokens = tokens;
    part_.name = std::move(name);
    part_.unit = std::move(unit);
    if (width > 0) part_.input = add(Value{.name = "input", .shape = {tokens, width}});
}

int Trace::add(Value value) {
    // Names are for people; a second value of one name gets a number.
    const std::string name = value.name;
    for (int number = 2; std::ranges::find(part_.values, value.name, &Value::name) != part_.values.end();
         ++number)
        value.name = fmt::format("{} ({})", name, number);
    part_.values.push_back(std::move(value));
    return static_cast<int>(part_.values.size()) - 1;
}

int Trace::add(ParamSpec parameter, bool is_tied) {
    std::string unit = part_.unit;
    if (unit.empty() || is_tied) {
        const std::size_t dot = parameter.name.find('.');
        if (dot == std::string::npos || parameter.name.find("{}") != std::string::npos) {
            programming_error(fmt::format("{}: {} is not the whole name of one tensor, such as shared.weight",
                                          part_.name, parameter.name));
        }
        unit = parameter.name.substr(0, dot);
        parameter.name.erase(0, dot + 1);
    }
    part_.parameters.push_back({std::move(unit), std::move(parameter), is_tied});
    return static_cast<int>(part_.parameters.size()) - 1;
}

int Trace::add(Node node, std::vector<Value> outputs) {
    const Operation& row = *node.operation;
    if (!row.forward || !row.backward || !row.work)
        refuse(node, "has no forward, no backward or no work in its row");
    if ((row.recompute == nullptr) != (row.recomputed < 0))
        refuse(node, "has only one of recompute and recomputed in its row");
    for (const int value : node.in) require(node, (*this)[value]);
    for (Value& value : outputs) node.out.push_back(add(std::move(value)));
    part_.nodes.push_back(std::move(node));
    return part_.nodes.back().out[0];
}

void Trace::refuse(const Node& node, std::string_view why) const {
    programming_error(fmt::format("{}: {} {} {}", part_.name, node.operation->name, node.name, why));
}

void Trace::require(const Node& node, const Value& given) const {
    const auto is = [](Placement of, int dim) {
        return of == Placement::divided ? fmt::format("{} in dimension {}", name_of(of), dim)
                                        : std::string(name_of(of));
    };
    const std::string is_given = is(given.placement, given.divided_dim),
                      takes = is(node.takes, node.divided_dim);
    if (is_given != takes)
        refuse(node, fmt::format("needs an input that is {}, but {} is {}", takes, given.name, is_given));
}

Part Trace::finish(int output) {
    part_.output = output;
    if (output >= 0 && (*this)[output].placement != Placement::stream) {
        refuse(part_.nodes.back(), fmt::format("leaves {} as {}, but the next part needs an input that is {}",
                                               (*this)[output].name, name_of((*this)[output].placement),
                                               name_of(Placement::stream)));
    }
    for (PartParameter& parameter : part_.parameters) {
        for (int i = 0; i < std::ssize(part_.parameters); ++i) {
            if (part_.parameters[static_cast<std::size_t>(i)].unit == parameter.unit)
                parameter.sums_of_unit.add(partial_gradient(part_, i));
        }
    }
    return std::move(part_);
}

}  // namespace llmc
