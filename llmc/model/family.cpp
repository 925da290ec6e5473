#include "llmc/model/family.h"

#include <algorithm>

#include "llmc/core/error.h"

namespace llmc {

namespace {

std::vector<const Family*>& registered() {
    static std::vector<const Family*> all;
    return all;
}

}  // namespace

std::span<const Family* const> families() { return registered(); }

RegisteredFamily::RegisteredFamily(const Family& family) { registered().push_back(&family); }

std::vector<FamilyOption> family_options() {
    std::vector<FamilyOption> options;
    for (const Family* family : families()) {
        for (const FamilyOption& option : family->options) {
            if (std::ranges::find(options, option.name, &FamilyOption::name) == options.end())
                options.push_back(option);
        }
    }
    return options;
}

std::vector<std::string> model_names() {
    std::vector<std::string> names;
    for (const Family* family : families()) {
        for (const NamedModel& model : family->models) names.emplace_back(model.name);
    }
    return names;
}

const Family& family_of(std::string_view model) {
    for (const Family* family : families()) {
        if (std::ranges::find(family->models, model, &NamedModel::name) != family->models.end())
            return *family;
    }
    programming_error("an unchecked name of a model");
}

const NamedModel& named_model(std::string_view name) {
    return *std::ranges::find(family_of(name).models, name, &NamedModel::name);
}

std::string_view name_of(const Family& family, const ModelChoices& choices) {
    const auto found = std::ranges::find_if(family.models, [&](const NamedModel& model) {
        return std::ranges::all_of(choices, [&](const auto& choice) {
            const auto size = model.choices.find(choice.first);
            return choice.second == (size == model.choices.end() ? 1 : size->second);
        });
    });
    return found == family.models.end() ? "" : found->name;
}

void check_sizes(const Family& family, const ModelChoices& choices) {
    for (const FamilyOption& option : family.options) {
        const std::int64_t size = choices.at(std::string(option.name));
        if (!option.is_switch && size < 1)
            user_error("--{} {} is out of range; give 1 or more", option.name, size);
    }
}

}  // namespace llmc
