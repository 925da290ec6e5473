#include "llmc/optim/formulas.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace llmc {

const Optimizer& optimizer_named(std::string_view name) {
    const auto found = std::ranges::find(all_optimizers, name, &Optimizer::name);
    check(found != all_optimizers.end(), "--optimizer is one of its names");
    return **found;
}

std::vector<std::string> optimizer_names() {
    std::vector<std::string> names;
    for (const Optimizer* optimizer : all_optimizers) names.emplace_back(optimizer->name);
    return names;
}

double default_weight_decay(const Optimizer& optimizer) {
    constexpr double of_adamw = 0.1;
    return of_adamw * optimizer.weight_decay;
}

namespace {

// "adamw 0.95, lion 0.99", of pairs of an optimizer and its default; or the one that all have.
std::string defaults_text(const std::vector<std::pair<std::string_view, double>>& defaults) {
    const double first = defaults.front().second;
    if (std::ranges::all_of(defaults, [&](const auto& each) { return each.second == first; }))
        return fmt::format("{}", first);
    std::string text;
    for (const auto& [name, value] : defaults)
        text += fmt::format("{}{}~{}", text.empty() ? "" : ", ", name, value);
    return text;
}

}  // namespace

std::string default_weight_decays() {
    std::vector<std::pair<std::string_view, double>> defaults;
    for (const Optimizer* optimizer : all_optimizers)
        defaults.emplace_back(optimizer->name, default_weight_decay(*optimizer));
    return defaults_text(defaults);
}

std::vector<std::string_view> optimizers_with(std::string_view hyperparameter) {
    std::vector<std::string_view> names;
    for (const Optimizer* optimizer : all_optimizers)
        if (std::ranges::find(optimizer->hyperparameters, hyperparameter, &Hyperparameter::name) !=
            optimizer->hyperparameters.end())
            names.push_back(optimizer->name);
    return names;
}

const std::vector<HyperparameterOption>& hyperparameter_options() {
    static const std::vector<HyperparameterOption> options = [] {
        std::vector<HyperparameterOption> made;
        std::map<std::string_view, std::vector<std::pair<std::string_view, double>>> defaults;
        for (const Optimizer* optimizer : all_optimizers) {
            for (const Hyperparameter& number : optimizer->hyperparameters) {
                auto found = std::ranges::find(made, number.name, &HyperparameterOption::name);
                if (found == made.end()) found = made.insert(found, {number.name, "", number.is_switch});
                found->help += fmt::format("{} --optimizer {}, {}", found->help.empty() ? "With" : "; with",
                                           optimizer->name, number.help);
                defaults[number.name].emplace_back(optimizer->name, number.default_value);
            }
        }
        for (HyperparameterOption& option : made)
            if (!option.is_switch)
                option.help += fmt::format(" (default:~{})", defaults_text(defaults[option.name]));
        return made;
    }();
    return options;
}

}  // namespace llmc
