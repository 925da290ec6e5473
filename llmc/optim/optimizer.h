// An optimizer as a description: its state, its numbers, and the parameters that it is for. Its formula stands beside
// the description (adamw.h, lion.h, sgd.h); formulas.h lists all. The store, plans, files and options read these, and
// name no optimizer.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace llmc {

enum class OptimizerKind : std::uint8_t { adamw, lion, sgd, muon };

// A tensor of state has a number for each element of a parameter.
struct StateTensor {
    std::string_view name;       // PyTorch's; in files "<parameter>.NAME"
    std::string_view described;  // "first moment"
    bool has_sign = true;        // otherwise no number is negative
};
inline constexpr std::size_t most_states = 2, most_hyperparameters = 4;

// A number of the formula, an option --NAME of the program.
struct Hyperparameter {
    std::string_view name, help;
    double default_value, lowest, highest;
    bool is_switch = false;                          // its value is 0 or 1, and 0 by default
    std::span<const std::string_view> choices = {};  // words of which its value is the number
};
using HyperparameterValues = std::array<double, most_hyperparameters>;

// Numbers of each tensor of state, of the same elements.
using LoadedState = std::array<std::vector<float>, most_states>;

struct Optimizer {
    OptimizerKind kind;
    std::string_view name;  // of --optimizer
    std::span<const StateTensor> state;
    std::span<const Hyperparameter> hyperparameters;  // in the order of UpdateStep::numbers
    // Multiples of the learning rate that suits a model with AdamW, and of the weight decay, by default.
    double learning_rate = 1, weight_decay = 1;
    // If set, the optimizer is for the matrices of the layers' products alone, which it updates as a whole, and the
    // other parameters have this one.
    const Optimizer* others = nullptr;
    // Then the factor of the rate of a matrix, and the rate where --lr is that of the others.
    double (*rate_factor)(double rows, double columns, const HyperparameterValues& numbers) = nullptr;
    double (*own_rate)(double learning_rate, const HyperparameterValues& numbers) = nullptr;
    std::string_view own_rate_name{};             // the hyperparameter that gives it
    void (*mend)(LoadedState& loaded) = nullptr;  // corrects what earlier programs have saved
};

// The most tensors of state that a parameter has.
constexpr std::size_t most_states_of(const Optimizer& optimizer) {
    return std::max(optimizer.state.size(), optimizer.others ? optimizer.others->state.size() : 0);
}

// The numbers of a step.
struct UpdateStep {
    std::int64_t step = 1;  // counts from 1
    double learning_rate = 0;
    HyperparameterValues numbers{};  // of the optimizer's hyperparameters
    double max_grad_norm = 0;        // clip the global norm to this; 0 does not clip
    double loss_scale = 1;           // of the gradients, a power of two
};

// The numbers of an element's parameter.
struct UpdateRates {
    float decay;   // what the formula makes of learning rate and weight decay
    float factor;  // of the learning rate, except in the decay
};

}  // namespace llmc
