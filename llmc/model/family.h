// Families of models: what a person may say of a model, by the program's options, and the model that comes of it. A family is
// one file, which registers it (gpt2.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/model/model.h"

namespace llmc {

// An option --NAME. Switches are on unless they are turned off.
enum class OptionKind { size /* memory grows with it */, division /* of a size */, on_off };
struct FamilyOption {
    std::string_view name, help;
    OptionKind kind = OptionKind::size;
    bool is_switch() const { return kind == OptionKind::on_off; }
};

// What a person said, or a named model says; switches are 0 or 1.
using ModelChoices = std::map<std::string, std::int64_t, std::less<>>;

struct NamedModel {
    std::string_view name;
    std::vector<std::int64_t> sizes;  // in the order of the family's options, which begin with the sizes
    double learning_rate;             // that suits it with AdamW
};

struct Family {
    std::string_view name;
    std::vector<FamilyOption> options;
    std::vector<NamedModel> models;  // the largest comes last
    // Of sizes of 1 or more; UserError for choices that make no model, with what would do. How large they may be is a matter
    // of memory, which the run's plan checks.
    Model (*make)(const ModelChoices& choices);
};

// All there are, in no particular order; a family adds itself by one of these at namespace scope.
const std::deque<Family>& families();
struct RegisteredFamily {
    explicit RegisteredFamily(Family family);
};

// Of all families: their options, each name once, and the models' names; the family that has a model of this name.
std::vector<FamilyOption> family_options();
std::vector<std::string> model_names();
const Family& family_of(std::string_view model);
const NamedModel& named_model(std::string_view name);
// The sizes of a named model.
ModelChoices choices_of(std::string_view model);

// The family's model; "tiny: " comes first in its description where the named model is chosen so. UserError for a size below 1.
Model make_model(const Family& family, const ModelChoices& choices);

// For a family's `make`: UserError if one size does not divide another.
void check_divides(const char* divisor, const char* size, const ModelChoices& choices);

}  // namespace llmc
