#include "llmc/io/adapter_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"
#include "llmc/io/safetensors.h"
#include "llmc/model/low_rank.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

// Keys that are read here, and those that change nothing of what an adapter computes. Any other key of PEFT that is set
// would.
constexpr std::array known_keys = {
    "r", "lora_alpha", "use_rslora", "lora_dropout", "bias", "init_lora_weights", "peft_type",
    "base_model_name_or_path",
    // the tensors say which matrices and layers have adapters
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    // what they are for, and where they are from
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "megatron_config",
    "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"};

bool is_unset(const Json& value) {
    const auto* const text = value.get_ptr<const std::string*>();
    return value.is_null() || value == false || (value.is_structured() && value.empty()) ||
           (text != nullptr && text->empty());
}

class ConfigOfAdapter {
  public:
    explicit ConfigOfAdapter(const std::filesystem::path& folder)
        : file_((folder / adapter_config_file).string()),
          json_(Json::parse(read_file(file_), nullptr, false)) {
        if (!json_.is_object()) user_error("{} is not an object in JSON; get the adapter again", file_);
    }

    void refuse_what_differs() const {
        if (value("peft_type") != "LORA") refuse("peft_type", "this program has adapters of type LORA");
        for (const auto& [key, value] : json_.items()) {
            if (std::ranges::find(known_keys, key) == known_keys.end() && !is_unset(value))
                refuse(key, "with it an adapter computes something else than this program");
        }
        if (!is_unset(value("bias")) && value("bias") != "none")
            refuse("bias", "this program leaves biases as they are");
        const Json init = value("init_lora_weights");
        if (!init.is_null() && !init.is_boolean() && init != "gaussian")
            refuse("init_lora_weights", "such an adapter may belong to another base than the one it names");
    }

    AdapterConfig read() const {
        AdapterConfig config;
        const Json r = value("r"), alpha = value("lora_alpha"), base = value("base_model_name_or_path"),
                   rslora = value("use_rslora");
        if (!r.is_number_integer() || r < 1 || r > most_adapter_rank)
            refuse("r", fmt::format("the rank is a whole number from 1 to {}", most_adapter_rank));
        if (!alpha.is_number() || !(alpha >= least_alpha && alpha <= greatest_alpha))
            refuse("lora_alpha",
                   fmt::format("it is a number from {:g} to {:g}", least_alpha, greatest_alpha));
        if (!rslora.is_null() && !rslora.is_boolean()) refuse("use_rslora", "it is true or false");
        config.rank = r;
        config.alpha = alpha;
        config.rslora = rslora == true;
        if (base.is_string()) config.base = base;
        return config;
    }

    // Those of "layers_to_transform", a number or a list; unset: all.
    void require_layers(const std::set<std::int64_t>& layers) const {
        const Json chosen = value("layers_to_transform");
        if (is_unset(chosen)) return;
        const auto is_chosen = [&](std::int64_t layer) {
            return chosen == layer || std::find(chosen.begin(), chosen.end(), Json(layer)) != chosen.end();
        };
        if (!std::ranges::all_of(layers, is_chosen))
            refuse("layers_to_transform", "the file has adapters of other layers");
    }

    std::vector<std::string> notes() const {
        const Json dropout = value("lora_dropout");
        if (is_unset(dropout) || dropout == 0) return {};
        return {fmt::format("{}: lora_dropout {} is not used: this program trains adapters without dropout",
                            file_, dropout.dump())};
    }

  private:
    Json value(const char* key) const {
        const auto found = json_.find(key);
        return found == json_.end() ? Json() : *found;
    }
    [[noreturn]] void refuse(std::string_view key, std::string_view why) const {
        constexpr std::size_t longest = 60;
        std::string text = value(std::string(key).c_str()).dump(-1, ' ', true);
        if (text.size() > longest) text = text.substr(0, longest) + "...";
        user_error("{}: {} is {}: {}; give another adapter", file_, key, text, why);
    }

    std::string file_;
    Json json_;
};

// The matrices whose tensors a file has. UserError for tensors of anything else.
std::vector<std::string> matrices_in(const SafetensorsReader& tensors, const std::string& file) {
    std::set<std::string> found;
    for (const SafetensorsEntry& tensor : tensors.entries()) {
        std::string_view name = tensor.name;
        const bool is_adapter = name.ends_with(lora_a) || name.ends_with(lora_b);
        if (is_adapter) name.remove_suffix(lora_a.size());
        const std::string_view module = name.substr(name.rfind('.') + 1);
        const auto* const matrix = std::ranges::find_if(
            adaptable, [&](std::string_view of) { return module == fmt::format("{}_proj", of); });
        if (!is_adapter || matrix == adaptable.end())
            user_error(
                "{}: {} is no adapter of a matrix of a layer (q_proj, k_proj, v_proj, o_proj, gate_proj, "
                "up_proj, down_proj); give another adapter",
                file, in_quotes(tensor.name));
        found.emplace(*matrix);
    }
    std::vector<std::string> matrices;
    for (const std::string_view of : adaptable)
        if (found.contains(std::string(of))) matrices.emplace_back(of);
    if (matrices.empty()) user_error("{} has no tensors; give another adapter", file);
    return matrices;
}

// The numbers of the layers whose tensors a file has.
std::set<std::int64_t> layers_in(const SafetensorsReader& tensors) {
    constexpr std::string_view before = ".layers.";
    std::set<std::int64_t> layers;
    for (const SafetensorsEntry& tensor : tensors.entries()) {
        const std::size_t place = tensor.name.find(before);
        if (place == std::string::npos) continue;
        const char* const first = tensor.name.data() + place + before.size();
        std::int64_t layer = 0;
        if (std::from_chars(first, tensor.name.data() + tensor.name.size(), layer).ec == std::errc())
            layers.insert(layer);
    }
    return layers;
}

std::string value_in(const std::map<std::string, std::string>& metadata, const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? "" : found->second;
}

}  // namespace

AdapterFolder read_adapter(const std::filesystem::path& folder) {
    std::error_code ignored;
    const std::filesystem::path weights = folder / adapter_weights_file;
    if (!std::filesystem::exists(folder / adapter_config_file, ignored) ||
        !std::filesystem::exists(weights, ignored))
        user_error("{} is no adapter: it has no {}; give a folder of PEFT's", folder.string(),
                   std::filesystem::exists(weights, ignored) ? adapter_config_file : adapter_weights_file);
    const ConfigOfAdapter config(folder);
    config.refuse_what_differs();
    AdapterFolder read{folder, config.read(), config.notes()};
    const SafetensorsReader tensors(weights);
    read.config.matrices = matrices_in(tensors, weights.string());
    read.config.base_checksum = value_in(tensors.metadata(), base_checksum_key);
    read.config.base_dtype = value_in(tensors.metadata(), base_dtype_key);
    config.require_layers(layers_in(tensors));
    if (read.config.base_checksum.empty())
        read.notes.push_back(fmt::format(
            "{} does not say which weights its base had: whether they are those of --init is not checked",
            folder.string()));
    return read;
}

std::string adapter_config_text(const AdapterConfig& config) {
    Json targets = Json::array();
    for (const std::string& matrix : config.matrices) targets.push_back(matrix + "_proj");
    Json alpha = config.alpha;
    if (config.alpha == std::floor(config.alpha)) alpha = static_cast<std::int64_t>(config.alpha);
    const Json json = {{"peft_type", "LORA"},
                       {"task_type", "CAUSAL_LM"},
                       {"base_model_name_or_path", config.base},
                       {"r", config.rank},
                       {"lora_alpha", alpha},
                       {"lora_dropout", 0.0},
                       {"bias", "none"},
                       {"use_rslora", config.rslora},
                       {"target_modules", targets},
                       {"init_lora_weights", true},
                       {"inference_mode", true}};
    return json.dump(2) + "\n";
}

}  // namespace llmc
