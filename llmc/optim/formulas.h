// The list of all optimizers, in the order of their kinds. A new one that updates each element by itself is a file with
// its description and its formula (sgd.h), a kind (optimizer.h), and a line in this list and in with_formula().
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/optim/adamw.h"
#include "llmc/optim/lion.h"
#include "llmc/optim/muon.h"
#include "llmc/optim/sgd.h"

namespace llmc {

inline constexpr std::array all_optimizers = {&adamw, &lion, &sgd, &muon};

static_assert([] {
    for (std::size_t i = 0; i < all_optimizers.size(); ++i)
        if (all_optimizers[i]->kind != static_cast<OptimizerKind>(i)) return false;
    return true;
}());

inline const Optimizer& optimizer_of(OptimizerKind kind) {
    return *all_optimizers[static_cast<std::size_t>(kind)];
}

// By a name of --optimizer, and all these names.
const Optimizer& optimizer_named(std::string_view name);
std::vector<std::string> optimizer_names();

// Its hyperparameters, and those of its others.
std::vector<Hyperparameter> all_numbers_of(const Optimizer& optimizer);

// The weight decay by default; and of all optimizers, for --help.
double default_weight_decay(const Optimizer& optimizer);
std::string default_weight_decays();

// Their hyperparameters, each name once: the text of --help, with the optimizers that have it and their defaults.
struct HyperparameterOption {
    std::string_view name;
    std::string help;
    bool is_switch;  // off by default
    std::vector<std::string> choices;
};
const std::vector<HyperparameterOption>& hyperparameter_options();
std::vector<std::string_view> optimizers_with(std::string_view hyperparameter);

// Calls f with the formula's type.
template <class F>
decltype(auto) with_formula(OptimizerKind kind, F&& f) {
    switch (kind) {
        case OptimizerKind::adamw:
            return f.template operator()<AdamW>();
        case OptimizerKind::lion:
            return f.template operator()<Lion>();
        case OptimizerKind::sgd:
            return f.template operator()<Sgd>();
        case OptimizerKind::muon:
            return f.template operator()<Muon>();
    }
    programming_error("an unknown optimizer");
}

}  // namespace llmc
