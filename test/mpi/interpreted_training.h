// Compares a training with the interpreter of traces (test/interpreter.h).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "test/interpreter.h"
#include "training_run.h"

namespace llmc::test {

// Calls f(name, values) for the state's weights (0), first moments (1) or second moments (2).
template <class F>
void for_each_of_state(const std::vector<UnitLayout>& units, std::span<const float> state, F&& f) {
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries()) {
            const auto values = state.subspan(static_cast<std::size_t>(entry.offset),
                                              static_cast<std::size_t>(entry.spec.shape.elements()));
            f(unit.full_name(entry.spec), values);
        }
        state = state.subspan(static_cast<std::size_t>(unit.elements()));
    }
}

inline double norm(const interpreter::Numbers& x) {
    return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

// Expects the loss, the norm and the gradients of the first step within a relative distance of the
// interpreter's. AdamW's first moment is then a tenth of the gradient, clipped to a norm of 1. A parameter's
// gradient may also differ by a share of the norm of all.
inline void expect_interpreted(const TrainingSetting& setting, const TrainingResult& result, double bound,
                               double share_of_all = 0) {
    using interpreter::Numbers;
    const Model& model = *setting.model;
    std::vector<UnitLayout> units;
    interpreter::Parameters initial;
    for (const Outline::OutlinedUnit& outlined : outline_of(model).units) {
        const UnitLayout& unit = units.emplace_back(outlined.spec);
        std::vector<float> values(static_cast<std::size_t>(unit.elements()));
        initialize_unit(values, 0, unit, 1);
        for_each_of_state({unit}, values, [&](const std::string& name, std::span<const float> of) {
            initial[name] = Numbers(of.begin(), of.end());
        });
    }
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(setting.sequences * model.sequence_length)),
        targets(tokens.size());
    fill_tokens(model, 0, 1, tokens, targets);
    const interpreter::Result exact =
        interpreter::interpret(model, initial, tokens, targets, 1 / static_cast<double>(tokens.size()));
    double squares = 0;
    for (const auto& [name, gradient] : exact.gradients) squares += norm(gradient) * norm(gradient);
    EXPECT_NEAR(result.losses[0], exact.loss, bound * exact.loss);
    EXPECT_NEAR(result.norms[0], squares, bound * squares);
    const double part = 0.1 * std::min(1.0, 1 / (std::sqrt(squares) + 1e-6));
    for_each_of_state(
        units, std::span(result.state).subspan(result.state.size() / 3),
        [&](const std::string& name, std::span<const float> m) {
            const Numbers& expected = exact.gradients.at(name);
            Numbers difference(m.begin(), m.end());
            for (std::size_t i = 0; i < difference.size(); ++i)
                difference[i] = difference[i] / part - expected[i];
            EXPECT_LE(norm(difference), bound * (norm(expected) + share_of_all * std::sqrt(squares))) << name;
        });
}

}  // namespace llmc::test
