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
using Defaults = std::vector<std::pair<std::string_view, std::string>>;
std::string defaults_text(const Defaults& defaults) {
    const std::string& first = defaults.front().second;
    if (std::ranges::all_of(defaults, [&](const auto& each) { return each.second == first; })) return first;
    std::string text;
    for (const auto& [name, value] : defaults)
        text += fmt::format("{}{}~{}", text.empty() ? "" : ", ", name, value);
    return text;
}

}  // namespace

std::string default_weight_decays() {
    Defaults defaults;
    for (const Optimizer* optimizer : all_optimizers)
        defaults.emplace_back(optimizer->name, fmt::format("{}", default_weight_decay(*optimizer)));
    return defaults_text(defaults);
}

std::vector<Hyperparameter> all_numbers_of(const Optimizer& optimizer) {
    std::vector<Hyperparameter> numbers(optimizer.hyperparameters.begin(), optimizer.hyperparameters.end());
    if (optimizer.others)
        numbers.insert(numbers.end(), optimizer.others->hyperparameters.begin(),
                       optimizer.others->hyperparameters.end());
    return numbers;
}

std::vector<std::string_view> optimizers_with(std::string_view hyperparameter) {
    std::vector<std::string_view> names;
    for (const Optimizer* optimizer : all_optimizers) {
        const std::vector<Hyperparameter> numbers = all_numbers_of(*optimizer);
        if (std::ranges::find(numbers, hyperparameter, &Hyperparameter::name) != numbers.end())
            names.push_back(optimizer->name);
    }
    return names;
}

const std::vector<HyperparameterOption>& hyperparameter_options() {
    static const std::vector<HyperparameterOption> options = [] {
        std::vector<HyperparameterOption> made;
        std::map<std::string_view, Defaults> defaults;
        for (const Optimizer* optimizer : all_optimizers) {
            for (const Hyperparameter& number : optimizer->hyperparameters) {
                auto found = std::ranges::find(made, number.name, &HyperparameterOption::name);
                if (found == made.end())
                    found = made.insert(
                        found,
                        {number.name, "", number.is_switch, {number.choices.begin(), number.choices.end()}});
                found->help += fmt::format("{} --optimizer {}, {}", found->help.empty() ? "With" : "; with",
                                           optimizer->name, number.help);
                const std::string of_default =
                    number.choices.empty()
                        ? fmt::format("{}", number.default_value)
                        : std::string(number.choices[static_cast<std::size_t>(number.default_value)]);
                defaults[number.name].emplace_back(optimizer->name, of_default);
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
