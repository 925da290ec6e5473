#include "llmc/model/config_json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "llmc/core/error.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

// Keys that do not change what a model computes.
constexpr std::array no_computation = {"architectures",
                                       "model_type",
                                       "bos_token_id",
                                       "eos_token_id",
                                       "pad_token_id",
                                       "sep_token_id",
                                       "decoder_start_token_id",
                                       "initializer_range",
                                       "use_cache",
                                       "pretraining_tp",
                                       "transformers_version",
                                       "torch_dtype",
                                       "dtype",
                                       "_name_or_path",
                                       "name_or_path",
                                       "output_attentions",
                                       "output_hidden_states",
                                       "return_dict",
                                       "task_specific_params",
                                       "problem_type",
                                       "id2label",
                                       "label2id",
                                       "finetuning_task",
                                       "chunk_size_feed_forward",
                                       "is_encoder_decoder",
                                       "is_decoder",
                                       "tokenizer_class",
                                       "prefix",
                                       "summary_type",
                                       "summary_use_proj",
                                       "summary_activation",
                                       "summary_proj_to_labels",
                                       "summary_first_dropout",
                                       "n_ctx",
                                       "torchscript",
                                       "use_bfloat16",
                                       "_attn_implementation_autoset",
                                       "reorder_and_upcast_attn"};
constexpr std::array dropouts = {"attention_dropout", "attn_pdrop",       "resid_pdrop",      "embd_pdrop",
                                 "hidden_dropout",    "residual_dropout", "embedding_dropout"};

bool is_dropout(std::string_view key) { return std::ranges::find(dropouts, key) != dropouts.end(); }

}  // namespace

const Json* ConfigReader::find(std::string_view key) {
    asked_.emplace(key);
    const auto found = config_.find(std::string(key));
    return found == config_.end() || found->is_null() ? nullptr : &*found;
}

void ConfigReader::refuse(std::string_view key, std::string_view why) const {
    user_error("{}: {} {}", name_, key, why);
}

bool ConfigReader::names(std::string_view key) {
    asked_.emplace(key);
    return config_.contains(std::string(key));
}

bool ConfigReader::has(std::string_view key) { return find(key) != nullptr; }

std::int64_t ConfigReader::size(std::string_view key, std::int64_t missing) {
    const Json* value = find(key);
    if (!value && missing > 0) return missing;
    if (!value) refuse(key, "is missing, so the model's sizes are not known; give a complete config.json");
    if (!value->is_number_integer() || value->get<std::int64_t>() < 1)
        refuse(key, fmt::format("is {}, but must be a whole number of 1 or more", value->dump()));
    return value->get<std::int64_t>();
}

double ConfigReader::number(std::string_view key, double missing) {
    const Json* value = find(key);
    if (!value) return missing;
    if (!value->is_number() || !std::isfinite(value->get<double>()) || value->get<double>() < 0)
        refuse(key, fmt::format("is {}, but must be a number of 0 or more", value->dump()));
    return value->get<double>();
}

bool ConfigReader::is_on(std::string_view key, bool missing) {
    const Json* value = find(key);
    if (!value) return missing;
    if (!value->is_boolean()) refuse(key, fmt::format("is {}, but must be true or false", value->dump()));
    return value->get<bool>();
}

std::string ConfigReader::text(std::string_view key, const std::string& missing) {
    const Json* value = find(key);
    if (!value) return missing;
    if (!value->is_string()) refuse(key, fmt::format("is {}, but must be a text", value->dump()));
    return value->get<std::string>();
}

void ConfigReader::require(std::string_view key, const std::vector<Json>& computed) {
    const Json* value = find(key);
    if (!value || std::ranges::find(computed, *value) != computed.end()) return;
    std::vector<std::string> texts;
    for (const Json& known : computed) texts.push_back(known.dump());
    refuse(key, texts.empty() ? "is given, and this program does not compute that; give another model"
                              : fmt::format("is {}, but this program computes only {}; give another model",
                                            value->dump(), fmt::join(texts, " or ")));
}

std::vector<std::string> ConfigReader::texts(std::string_view key) {
    const Json* value = find(key);
    if (!value) return {};
    const auto is_text = [](const Json& element) { return element.is_string(); };
    if (!value->is_array() || value->empty() || !std::ranges::all_of(*value, is_text))
        refuse(key, fmt::format("is {}, but must be an array of texts", value->dump()));
    return value->get<std::vector<std::string>>();
}

Json ConfigReader::object(std::string_view key) {
    const Json* value = find(key);
    if (!value) return Json::object();
    if (!value->is_object()) refuse(key, fmt::format("is {}, but must be an object", value->dump()));
    return *value;
}

std::vector<std::string> ConfigReader::notes() const {
    std::vector<std::string> dropped, unknown, notes;
    for (const auto& [key, value] : config_.items()) {
        if (is_dropout(key)) {
            if (value.is_number() && value.get<double>() > 0) dropped.push_back(key);
        } else if (!asked_.contains(key) && !value.is_null() &&
                   std::ranges::find(no_computation, key) == no_computation.end()) {
            unknown.push_back(key);
        }
    }
    if (!dropped.empty())
        notes.push_back(fmt::format("{}: {} {} as 0: this program has no dropout", name_,
                                    fmt::join(dropped, ", "), dropped.size() == 1 ? "counts" : "count"));
    if (!unknown.empty())
        notes.push_back(fmt::format("{}: {} {} kept, but not used", name_, fmt::join(unknown, ", "),
                                    unknown.size() == 1 ? "is" : "are"));
    return notes;
}

void ConfigWriter::set(const std::string& key, const Json& value, const std::optional<Json>& missing) {
    const auto found = config_.find(key);
    const bool is_given = found != config_.end() && !found->is_null();
    if (is_given ? *found == value : !is_new_ && missing && *missing == value) return;
    config_[key] = value;
}

void ConfigWriter::correct(const std::string& key, const Json& value) {
    const auto found = config_.find(key);
    if (found != config_.end() && !found->is_null()) config_[key] = value;
}

}  // namespace llmc
