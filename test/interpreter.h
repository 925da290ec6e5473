// An interpreter of a model's trace in fp64. It computes the loss and the gradients of all parameters by the
// formulas of llmc/device/ops.h, one operation at a time. It is a second, independent implementation: it
// knows no lists, no memory and no ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/standard_library.h"
#include "llmc/model/model.h"
#include "test/interpreter_formulas.h"

namespace llmc::interpreter {

// ---- a whole model

struct Result {
    double loss = 0;  // the sum over all tokens, without the scale
    Parameters gradients;
};

// The result for `scale` times the sum of the losses of all tokens.
inline Result interpret(const Model& model, Parameters parameters, std::span<const std::int32_t> tokens,
                        std::span<const std::int32_t> targets, double scale) {
    const Outline outline = outline_of(model);
    const std::int64_t sequences = std::ssize(tokens) / model.sequence_length;
    Result result;
    for (const auto& [name, values] : parameters) result.gradients[name].resize(values.size());
    const std::size_t count = outline.parts.size();
    std::vector<std::vector<Numbers>> values(count), gradients(count);
    // Visits the part's nodes in one direction.
    const auto visit = [&](std::size_t number, const auto& f) {
        const Part& part = outline.kind_of(static_cast<int>(number)).part;
        std::vector<Numbers*> own, own_gradients;
        for (std::size_t i = 0; i < part.parameters.size(); ++i) {
            const std::string name = outline.unit(outline.parts[number].parameter_units[i]).spec.name + "." +
                                     part.parameters[i].spec.name;
            own.push_back(&parameters.at(name));
            own_gradients.push_back(&result.gradients.at(name));
        }
        f(part, [&](const Node& node, auto pass) {
            (meanings().at(node.operation->name).*pass)({part, node, sequences, tokens, targets,
                                                         values[number], gradients[number], own,
                                                         own_gradients});
        });
    };
    for (std::size_t number = 0; number < count; ++number) {
        visit(number, [&](const Part& part, const auto& run) {
            for (const Value& value : part.values)
                values[number].emplace_back(at(sequences * value.shape.elements()));
            gradients[number] = values[number];
            if (part.input >= 0)
                values[number][at(part.input)] =
                    values[number - 1][at(outline.kind_of(static_cast<int>(number) - 1).part.output)];
            for (const Node& node : part.nodes) run(node, &Meaning::forward);
        });
    }
    const Node& head = outline.kinds[at(outline.parts.back().kind)].part.nodes.back();
    for (const double loss : values.back()[at(head.out[0])]) result.loss += loss;
    std::ranges::fill(gradients.back()[at(head.out[0])], scale);
    for (std::size_t number = count; number-- > 0;) {
        visit(number, [&](const Part& part, const auto& run) {
            if (part.output >= 0)
                gradients[number][at(part.output)] =
                    gradients[number + 1][at(outline.kind_of(static_cast<int>(number) + 1).part.input)];
            for (const Node& node : Reversed(part.nodes)) run(node, &Meaning::backward);
        });
    }
    return result;
}

}  // namespace llmc::interpreter
