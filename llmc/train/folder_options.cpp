#include "llmc/train/folder_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/data/tokenizer_files.h"
#include "llmc/io/files.h"
#include "llmc/io/safetensors.h"
#include "llmc/model/config_json.h"
#include "llmc/model/family.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

// Hugging Face's names of dtypes.
constexpr std::array<std::pair<const char*, const char*>, 3> dtypes = {
    {{"fp32", "float32"}, {"bf16", "bfloat16"}, {"fp16", "float16"}}};
// The key of the dtype; from version 5 on, the first one counts.
constexpr std::array dtype_keys = {"dtype", "torch_dtype"};

// config.json as an object; an empty one for a model that did not come from a folder.
Json config_of(const Options& options) {
    return options.folder ? Json::parse(options.folder->config) : Json::object();
}

bool has(const Json& config, const char* key) { return config.contains(key) && !config[key].is_null(); }
// Our name of the dtype that config.json names; "auto" names none.
std::optional<std::string> dtype_in(const Json& config) {
    for (const char* key : dtype_keys) {
        for (const auto& [ours, theirs] : dtypes)
            if (has(config, key) && config[key] == theirs) return ours;
    }
    return std::nullopt;
}

// Hugging Face's name of a dtype.
std::string name_in_config(std::string_view dtype) {
    return std::ranges::find(dtypes, dtype, [](const auto& of) { return std::string_view(of.first); })
        ->second;
}

std::vector<std::string_view> known_types() {
    std::vector<std::string_view> types;
    for (const Family& family : families())
        types.insert(types.end(), family.model_types.begin(), family.model_types.end());
    std::ranges::sort(types);
    return types;
}

// Whether no option changes the folder's model.
bool has_own_sizes(const Options& options) {
    return std::ranges::all_of(options.model_options, [](const auto& option) {
        return option.first == "seq-len" ||
               std::visit([](const auto& value) { return !value; }, option.second);
    });
}

// UserError if the sizes make no model. Its advice is not to change one of them: the weights have these sizes.
void require_model(const Family& family, const ModelChoices& choices, const std::string& file) {
    try {
        static_cast<void>(make_model(family, choices));
    } catch (const UserError& fault) {
        const std::string_view what = fault.what();
        user_error("{}: {}; get the folder again", file, what.substr(0, what.find("; ")));
    }
}

void set_if_unset(ModelOption& option, const ModelValue& value) {
    std::visit([&]<class T>(std::optional<T>& of) { of = of.value_or(std::get<T>(value)); }, option);
}

}  // namespace

void take_folder(Options& options, const ModelFolder& folder) {
    const std::string file = (std::filesystem::path(folder.name) / "config.json").string();
    const Json config = Json::parse(folder.config, nullptr, false);
    if (!config.is_object()) user_error("{} is not an object in JSON; get the folder again", file);
    ConfigReader reader(config, file,
                        std::get<std::optional<std::int64_t>>(options.model_options.find("seq-len")->second));
    const std::string type = reader.text("model_type", "");
    const Family* family = family_of_type(type);
    if (!family)
        user_error("{}: the model_type is {}, but this program knows only {}; give another model", file,
                   in_quotes(type), fmt::join(known_types(), ", "));
    for (const char* key : {"quantization_config", "auto_map"}) reader.require(key, {});
    const ModelChoices choices = family->from_config(reader);
    if (has_own_sizes(options)) require_model(*family, choices, file);
    for (const auto& [name, value] : choices.values)
        set_if_unset(options.model_options.find(name)->second, value);
    options.model = family->name;
    options.folder = {folder.path, config.dump()};
    const std::vector<std::string> notes = reader.notes();
    options.notes.insert(options.notes.end(), notes.begin(), notes.end());
}

// It is kept in config.json, and so in checkpoints: a run that goes on does not read the weights of --init.
void take_dtype(Options& options, DType weights) {
    Json config = config_of(options);
    if (!options.folder || dtype_in(config)) return;
    config["torch_dtype"] = name_in_config(name_of(weights));
    options.folder->config = config.dump();
}

std::string folder_of_tokens(const Options& options) {
    if (!options.folder) return "";
    const std::string& folder = options.folder->path;
    return options.vocabulary() == byte_vocabulary && !has_tokenizer(folder) ? "" : folder;
}

std::string folder_of_tokenizer(const Options& options) {
    for (const std::string& folder : {options.tokenizer, options.tokenizer_of_checkpoint})
        if (!folder.empty()) return folder;
    if (!options.lora.empty() && has_tokenizer(options.lora)) return options.lora;
    if (options.folder && has_tokenizer(options.folder->path)) return options.folder->path;
    const bool is_gpt2 = options.vocabulary() == gpt2_vocabulary && has_tokenizer(gpt2_tokenizer_folder);
    return is_gpt2 ? gpt2_tokenizer_folder : "";
}

constexpr const char* generation_config_file = "generation_config.json";

TokenizerFiles tokenizer_files_of(const Options& options, const std::string& folder) {
    TokenizerFiles files = read_tokenizer_files(folder);
    if (options.folder) {
        TokenizerFiles own = read_tokenizer_files(options.folder->path);
        if (auto config = own.extract(generation_config_file)) files.insert(std::move(config));
    }
    return files;
}

TokenizerFiles with_names_of_folders(TokenizerFiles files) {
    for (const auto& [name, other] :
         {std::pair(gpt2_ids_file, "vocab.json"), std::pair(gpt2_merges_file, "merges.txt")}) {
        if (auto file = files.extract(name)) {
            file.key() = other;
            files.insert(std::move(file));
        }
    }
    return files;
}

namespace {

// The tokens of the vocabulary that a value of a configuration names: one number, or a list of them.
std::vector<std::int32_t> tokens_in(const Json& config, const char* key, std::int64_t vocabulary) {
    std::vector<std::int32_t> tokens;
    const auto take = [&](const Json& value) {
        if (!value.is_number_integer()) return;
        const auto token = value.get<std::int64_t>();
        if (token >= 0 && token < vocabulary) tokens.push_back(static_cast<std::int32_t>(token));
    };
    const auto found = config.find(key);
    if (found == config.end()) return tokens;
    take(*found);
    if (found->is_array()) std::ranges::for_each(*found, take);
    return tokens;
}

}  // namespace

std::optional<std::int32_t> begin_token(const Options& options) {
    const std::vector<std::int32_t> tokens =
        tokens_in(config_of(options), "bos_token_id", options.vocabulary());
    return tokens.empty() ? std::nullopt : std::optional(tokens[0]);
}

std::vector<std::int32_t> end_tokens(const Options& options, const TokenizerFiles& tokenizer) {
    constexpr const char* key = "eos_token_id";
    if (const auto found = tokenizer.find(generation_config_file); found != tokenizer.end()) {
        const Json config = Json::parse(found->second, nullptr, false);
        if (!config.is_object())
            user_error("{} of the model's tokenizer is not an object in JSON; get the folder again",
                       generation_config_file);
        const std::vector<std::int32_t> tokens = tokens_in(config, key, options.vocabulary());
        if (!tokens.empty()) return tokens;
    }
    return tokens_in(config_of(options), key, options.vocabulary());
}

std::string exported_config(const Options& options) {
    Json config = config_of(options);
    const Family& family = family_of(options.model);
    if (!family.to_config)
        user_error(
            "--export: Hugging Face's library has no models of the family {}; export a single .safetensors "
            "file",
            family.name);
    family.to_config(options.choices_of_model(), config);
    // A longer context than the folder's.
    constexpr const char* positions = "max_position_embeddings";
    if (config.contains(positions) && config[positions] < options.sequence_length())
        config[positions] = options.sequence_length();
    // Older and newer versions of the library read another one.
    const std::string dtype = name_in_config(exported_dtype(options));
    if (!dtype_in(config)) config["torch_dtype"] = dtype;
    for (const char* key : dtype_keys) {
        if (has(config, key)) config[key] = dtype;
    }
    return config.dump(2) + "\n";
}

std::string exported_dtype(const Options& options) {
    if (!options.export_dtype.empty()) return options.export_dtype;
    return dtype_in(config_of(options)).value_or("fp32");
}

}  // namespace llmc
