// Families of models: what a person may say of a model, by the program's options, and the model that comes of it. A family is
// one file, which registers it (gpt2.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/model/model.h"

namespace llmc {

// An option --NAME: a size, or a switch that is on unless it is turned off.
struct FamilyOption {
    std::string_view name, help;
    bool is_switch = false;
};

// What a person said, or a named model says; switches are 0 or 1.
using ModelChoices = std::map<std::string, std::int64_t, std::less<>>;

struct NamedModel {
    std::string_view name;
    ModelChoices choices;  // of all sizes
    double learning_rate;  // that suits it with AdamW
};

struct Family {
    std::string_view name;
    std::vector<FamilyOption> options;
    std::vector<NamedModel> models;
    // UserError for choices that make no model, with what would do. How large they may be is a matter of memory, which the
    // run's plan checks.
    Model (*make)(const ModelChoices& choices);
};

// All there are, in no particular order; a family adds itself by one of these at namespace scope.
std::span<const Family* const> families();
struct RegisteredFamily {
    explicit RegisteredFamily(const Family& family);
};

// Of all families: their options, each name once, and the models' names; the family that has a model of this name.
std::vector<FamilyOption> family_options();
std::vector<std::string> model_names();
const Family& family_of(std::string_view model);
const NamedModel& named_model(std::string_view name);
// "tiny", of the named model that is chosen so; empty where there is none.
std::string_view name_of(const Family& family, const ModelChoices& choices);

// UserError if a size is less than 1.
void check_sizes(const Family& family, const ModelChoices& choices);

}  // namespace llmc
