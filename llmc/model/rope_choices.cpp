// The choices of rotary positions: as options, and as keys of config.json.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "llmc/core/error.h"
#include "llmc/model/config_json.h"
#include "llmc/model/family.h"

namespace llmc {

namespace {

// The context for which the frequencies were before they were scaled: beside rope_scaling, or in it.
constexpr const char* original_positions = "original_max_position_embeddings";

// "FACTOR,LOW,HIGH,POSITIONS"
std::optional<RopeScaling> parsed(const std::string& text) {
    RopeScaling s{};
    char a = 0, b = 0, c = 0;
    std::istringstream in(text);
    in >> s.factor >> a >> s.low_frequency_factor >> b >> s.high_frequency_factor >> c >>
        s.original_positions;
    const bool is_whole = in && in.peek() == std::istringstream::traits_type::eof();
    if (!is_whole || a != ',' || b != ',' || c != ',' || !(s.factor >= 1) || !(s.low_frequency_factor > 0) ||
        !(s.high_frequency_factor > s.low_frequency_factor) || s.original_positions < 1)
        return std::nullopt;
    return s;
}

std::string as_text(const RopeScaling& s) {
    return fmt::format("{},{},{},{}", s.factor, s.low_frequency_factor, s.high_frequency_factor,
                       s.original_positions);
}

// The values of rope_scaling or rope_parameters.
nlohmann::ordered_json as_json(const RopeScaling& s) {
    return {{"rope_type", "llama3"},
            {"factor", s.factor},
            {"low_freq_factor", s.low_frequency_factor},
            {"high_freq_factor", s.high_frequency_factor},
            {original_positions, s.original_positions}};
}

}  // namespace

double rope_theta(const ModelChoices& choices) {
    const double theta = choices.number("rope-theta");
    if (!(theta > 0)) user_error("--rope-theta {} is out of range; give more than 0, such as 10000", theta);
    return theta;
}

std::optional<RopeScaling> rope_scaling(const ModelChoices& choices) {
    const std::string& text = choices.text("rope-scaling");
    if (text == "none") return std::nullopt;
    if (const auto scaling = parsed(text)) return scaling;
    user_error("--rope-scaling '{}' is not none or FACTOR,LOW,HIGH,POSITIONS; Llama 3.1 has 8,1,4,8192",
               text);
}

// As transformers 5.24 reads them: rope_scaling wins over rope_parameters, and a theta in either wins over
// rope_theta. The original context beside them wins over the one in them; without either, it is the longest context.
void read_rope(ConfigReader& config, ModelChoices& choices, std::int64_t positions) {
    config.require("partial_rotary_factor", {1.0});
    const nlohmann::ordered_json scaling = config.object("rope_scaling"),
                                 parameters = config.object("rope_parameters");
    const std::string key = scaling.empty() ? "rope_parameters" : "rope_scaling";
    const nlohmann::ordered_json& given = scaling.empty() ? parameters : scaling;
    for (const auto& [name, value] : given.items()) {
        if (value.is_object())
            config.refuse(key, fmt::format("has parameters for {} alone, but here all layers are alike; give "
                                           "another model",
                                           name));
    }
    ConfigReader of_rope(given, fmt::format("{}: {}", config.name(), key));
    const double theta = of_rope.number("rope_theta", config.number("rope_theta", 1e4));
    of_rope.require("partial_rotary_factor", {1.0});
    const std::string type = of_rope.text("rope_type", of_rope.text("type", "default"));
    if (type != "default" && type != "llama3")
        config.refuse(
            key, fmt::format("has the rope_type '{}', but this program computes only default and llama3; "
                             "give another model",
                             type));
    std::string text = "none";
    if (type == "llama3") {
        const std::int64_t longest = config.size("max_position_embeddings", positions);
        text = as_text({of_rope.number("factor", 0), of_rope.number("low_freq_factor", 0),
                        of_rope.number("high_freq_factor", 0),
                        config.size(original_positions, of_rope.size(original_positions, longest))});
        if (!parsed(text))
            config.refuse(key, fmt::format("is {}, which is no scaling of Llama 3.1's kind", given.dump()));
    }
    choices.values.insert_or_assign("rope-theta", theta);
    choices.values.insert_or_assign("rope-scaling", text);
}

void write_rope(const ModelChoices& choices, nlohmann::ordered_json& config, bool is_new,
                std::int64_t positions) {
    const std::optional<RopeScaling> scaling = rope_scaling(choices);
    const double theta = choices.number("rope-theta");
    const auto has = [&](const char* key) { return config.contains(key) && !config[key].is_null(); };
    // What says the same stays as it is. But an export may have a longer context, which is not the original one.
    if (!is_new) {
        ConfigReader reader(config, "config.json");
        ModelChoices present;
        read_rope(reader, present, positions);
        if (present.number("rope-theta") == theta && rope_scaling(present) == scaling) {
            if (scaling && !has(original_positions)) {
                const bool is_first = has("rope_scaling") && !config["rope_scaling"].empty();
                nlohmann::ordered_json& given = config[is_first ? "rope_scaling" : "rope_parameters"];
                given[original_positions] = scaling->original_positions;
            }
            return;
        }
    }
    if (scaling && has(original_positions)) config[original_positions] = scaling->original_positions;
    nlohmann::ordered_json parameters =
        scaling ? as_json(*scaling) : nlohmann::ordered_json{{"rope_type", "default"}};
    if (has("rope_parameters")) {
        parameters["rope_theta"] = theta;
        config["rope_parameters"] = parameters;
        config.erase("rope_scaling");
        return;
    }
    config["rope_theta"] = theta;
    config["rope_scaling"] = scaling ? parameters : nlohmann::ordered_json();
}

}  // namespace llmc
