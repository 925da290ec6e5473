// Families of models: the options that describe a model, and the function that makes it. A family is one
// file, which registers it (gpt2.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/model/model.h"

namespace llmc {

// An option --NAME. Switches are on unless the user turns them off.
enum class OptionKind {
    size /* memory grows with it */,
    division /* into how many equal parts a size is divided */,
    on_off
};
struct FamilyOption {
    std::string_view name, help;
    OptionKind kind = OptionKind::size;
    bool is_switch() const { return kind == OptionKind::on_off; }
};

// The values of options, given by the user or by a named model; switches are 0 or 1.
using ModelChoices = std::map<std::string, std::int64_t, std::less<>>;

struct NamedModel {
    std::string_view name;
    std::vector<std::int64_t>
        sizes;  // in the order of the family's options, whose sizes and divisions come before the switches
    double learning_rate;  // suits the model with AdamW
};

struct Family {
    std::string_view name;
    std::vector<FamilyOption> options;
    std::vector<NamedModel> models;  // the largest comes last
    // Makes the model for sizes of 1 or more. Throws a UserError that suggests valid values if the choices do
    // not describe a model. The run's plan checks whether a size fits in memory.
    Model (*make)(const ModelChoices& choices);
};

// All families, in no particular order. A family adds itself by a RegisteredFamily at namespace scope.
const std::deque<Family>& families();
struct RegisteredFamily {
    explicit RegisteredFamily(Family family);
};

// For all families: their options, each name once; the names of models; the family with the model of this
// name.
std::vector<FamilyOption> family_options();
std::vector<std::string> model_names();
const Family& family_of(std::string_view model);
const NamedModel& named_model(std::string_view name);
// The sizes of a named model.
ModelChoices choices_of(std::string_view model);

// Makes the family's model. If the choices are those of a named model, its name comes first in the
// description ("tiny: "). Throws a UserError for a size below 1.
Model make_model(const Family& family, const ModelChoices& choices);

// For a family's `make`: throws a UserError if one size does not divide another.
void check_divides(const char* divisor, const char* size, const ModelChoices& choices);

}  // namespace llmc
