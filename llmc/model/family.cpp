// Registers families, finds named models, and checks the user's sizes.
#include "llmc/model/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

namespace {

std::deque<Family>& registered() {
    static std::deque<Family> all;
    return all;
}

}  // namespace

const std::deque<Family>& families() { return registered(); }

RegisteredFamily::RegisteredFamily(Family family) {
    // Other options of a run depend on these.
    for (const std::string_view needed : {"layers", "seq-len", "vocab-size"}) {
        if (std::ranges::find(family.options, needed, &FamilyOption::name) == family.options.end())
            programming_error(fmt::format("family {} has no option {}", family.name, needed));
    }
    // On the command line, an option is one for all families.
    for (const FamilyOption& option : family.options) {
        for (const FamilyOption& known : family_options()) {
            if (known.name == option.name && known.kind != option.kind)
                programming_error(fmt::format("option {} of family {} is of another kind elsewhere",
                                              option.name, family.name));
        }
    }
    registered().push_back(std::move(family));
}

std::vector<FamilyOption> family_options() {
    std::vector<FamilyOption> options;
    for (const Family& family : families()) {
        for (const FamilyOption& option : family.options) {
            if (std::ranges::find(options, option.name, &FamilyOption::name) == options.end())
                options.push_back(option);
        }
    }
    return options;
}

std::vector<std::string> model_names() {
    std::vector<std::string> names;
    for (const Family& family : families()) {
        for (const NamedModel& model : family.models) names.emplace_back(model.name);
    }
    return names;
}

bool is_known_model(std::string_view model) {
    const std::vector<std::string> names = model_names();
    return std::ranges::find(names, model) != names.end() ||
           std::ranges::find(families(), model, &Family::name) != families().end();
}

const Family& family_of(std::string_view model) {
    for (const Family& family : families()) {
        if (std::ranges::find(family.models, model, &NamedModel::name) != family.models.end()) return family;
    }
    // A model without a name, such as a folder's, has that of its family.
    for (const Family& family : families()) {
        if (family.name == model) return family;
    }
    programming_error("an unchecked name of a model");
}

const NamedModel& named_model(std::string_view name) {
    const std::vector<NamedModel>& models = family_of(name).models;
    const auto found = std::ranges::find(models, name, &NamedModel::name);
    return found == models.end() ? models.front() : *found;
}

const Family* family_of_type(std::string_view model_type) {
    for (const Family& family : families()) {
        if (std::ranges::find(family.model_types, model_type) != family.model_types.end()) return &family;
    }
    return nullptr;
}

ModelChoices choices_of(std::string_view model) {
    const std::vector<FamilyOption>& options = family_of(model).options;
    const NamedModel& named = named_model(model);
    ModelChoices choices;
    for (std::size_t i = 0; i < options.size(); ++i)
        choices.values.emplace(
            options[i].name, options[i].is_size() ? ModelValue(named.sizes.at(i)) : options[i].default_value);
    for (const auto& [name, value] : named.others) choices.values.find(name)->second = value;
    return choices;
}

Model make_model(const Family& family, const ModelChoices& choices) {
    std::vector<ModelSize> sizes;
    for (std::size_t i = 0; i < family.options.size(); ++i) {
        const FamilyOption& option = family.options[i];
        const auto require_at_least = [&](auto value, int least) {
            if (!(value >= static_cast<decltype(value)>(least)))
                user_error("--{} {} is out of range; give {} or more", option.name, value, least);
        };
        if (option.is_size()) require_at_least(choices.size(option.name), 1);
        if (option.kind == OptionKind::count) require_at_least(choices.size(option.name), 0);
        if (option.kind == OptionKind::number) {
            require_at_least(choices.number(option.name), 0);
            if (std::isinf(choices.number(option.name)))
                user_error("--{} inf is out of range; give a finite number", option.name);
        }
        if (option.kind == OptionKind::size)
            sizes.push_back({option.name, choices.size(option.name), family.models.back().sizes.at(i)});
    }
    Model model = family.make(choices);
    model.sizes = std::move(sizes);
    const auto named = std::ranges::find_if(
        family.models, [&](const NamedModel& known) { return choices_of(known.name) == choices; });
    if (named != family.models.end()) model.description.insert(0, fmt::format("{}: ", named->name));
    return model;
}

}  // namespace llmc
