// Families of models: the options that describe a model, and the function that makes it. A family is one
// file, which registers it (gpt2.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "llmc/model/model.h"

namespace llmc {

class ConfigReader;

// The value of an option: a whole number, a number, a text, or a switch.
using ModelValue = std::variant<std::int64_t, double, std::string, bool>;

enum class OptionKind {
    size /* 1 or more; memory grows with it */,
    division /* 1 or more: into how many equal parts a size is divided */,
    count /* a whole number, 0 or more */,
    number /* 0 or more */,
    text,
    on_off
};

// An option --NAME.
struct FamilyOption {
    std::string_view name, help;
    OptionKind kind = OptionKind::size;
    ModelValue default_value{};    // that of models which do not name a value; none for sizes and divisions
    std::string_view value = "N";  // the word that stands for a value in --help
    std::vector<std::string> choices{};  // of a text: its values; empty: any
    bool is_size() const { return kind == OptionKind::size || kind == OptionKind::division; }
};

// The values of a family's options, given by the user or by a named model.
struct ModelChoices {
    std::map<std::string, ModelValue, std::less<>> values;

    std::int64_t size(std::string_view name) const { return get<std::int64_t>(name); }
    double number(std::string_view name) const { return get<double>(name); }
    const std::string& text(std::string_view name) const { return get<std::string>(name); }
    bool is_on(std::string_view name) const { return get<bool>(name); }
    bool operator==(const ModelChoices&) const = default;

  private:
    // Throws if the option has no value of this type.
    template <class T>
    const T& get(std::string_view name) const {
        return std::get<T>(values.find(name)->second);
    }
};

struct NamedModel {
    std::string_view name;
    // In the order of the family's options, of which the sizes and divisions come first.
    std::vector<std::int64_t> sizes;
    double learning_rate;  // suits the model with AdamW
    // The other options whose values are not the family's defaults.
    std::vector<std::pair<std::string_view, ModelValue>> others{};
    // Tokens of a global batch and of a context with which the model was published; 0: not known, or the default. Plans
    // of a whole run take them.
    std::int64_t batch_tokens = 0, context = 0;
};

struct Family {
    std::string_view name;
    std::vector<FamilyOption> options;
    std::vector<NamedModel> models;  // the largest comes last
    // Makes the model for sizes of 1 or more. Throws a UserError that suggests valid values if the choices do
    // not describe a model. The run's plan checks whether a size fits in memory.
    Model (*make)(const ModelChoices& choices);
    // The values of "model_type" in config.json (config_json.h) that mean models of this family.
    std::vector<std::string_view> model_types{};
    // The choices of a config.json; seq-len is that of the run. UserError for a model that this program does not
    // compute.
    ModelChoices (*from_config)(ConfigReader& config) = nullptr;
    // Writes the choices into a config.json: that of a folder, of which other keys stay, or a new one. UserError
    // names the option with which Hugging Face's library could not compute the model.
    void (*to_config)(const ModelChoices& choices, nlohmann::ordered_json& config) = nullptr;
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
bool is_known_model(std::string_view model);  // the name of a model, or of a family
const Family& family_of(std::string_view model);
const NamedModel& named_model(std::string_view name);
// The values of all options of a named model.
ModelChoices choices_of(std::string_view model);
// The family of models with this "model_type"; null if there is none.
const Family* family_of_type(std::string_view model_type);

// Makes the family's model. If the choices are those of a named model, its name comes first in the
// description ("tiny: "). Throws a UserError for a size below 1, or another number below 0.
Model make_model(const Family& family, const ModelChoices& choices);

// The option of this name (family_options.cpp), with the value of models of the family that do not name one.
FamilyOption family_option(std::string_view name, ModelValue default_value = {});

// For a family's `make`: throws a UserError if one size does not divide another.
void check_divides(const char* divisor, const char* size, const ModelChoices& choices);
// H query heads, K key heads and their size D, of --heads, --kv-heads, --head-size and --channels. D is even.
struct HeadSizes {
    std::int64_t queries, keys, size;
};
HeadSizes head_sizes(const ModelChoices& choices);
// Of --rope-theta and --rope-scaling (rope_choices.cpp).
double rope_theta(const ModelChoices& choices);
std::optional<RopeScaling> rope_scaling(const ModelChoices& choices);
// theta and the scaling of a config.json. Without max_position_embeddings, the longest context is `positions`.
void read_rope(ConfigReader& config, ModelChoices& choices, std::int64_t positions);
void write_rope(const ModelChoices& choices, nlohmann::ordered_json& config, bool is_new,
                std::int64_t positions);

}  // namespace llmc
