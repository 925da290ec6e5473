#include "llmc/planner/foreign_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <ranges>
#include <span>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/planner/config_tree.h"
#include "llmc/planner/foreign_keys.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

bool equal_letters(std::string_view a, std::string_view b) {
    return std::ranges::equal(
        a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string shortened(std::string_view text) {
    constexpr std::size_t most = 60;
    return one_line(text.size() > most ? std::string(text.substr(0, most)) + "..." : std::string(text));
}

std::optional<double> number_in(const Json& value) {
    if (value.is_number()) return value.get<double>();
    if (!value.is_string()) return std::nullopt;
    const std::string text = value.get<std::string>();
    double number{};
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && rest == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

// DeepSpeed's configurations write 5e8 for whole numbers too.
std::optional<std::int64_t> whole_number_in(const Json& value) {
    constexpr double most = 1e15;
    const std::optional<double> number = number_in(value);
    const bool is_whole = number && std::floor(*number) == *number && std::abs(*number) <= most;
    return is_whole ? std::optional(static_cast<std::int64_t>(*number)) : std::nullopt;
}

// A value as the tables of keys have it.
std::string text_of(const Json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (const auto whole = whole_number_in(value)) return fmt::to_string(*whole);
    return value.dump();
}

bool is_among(std::string_view value, std::string_view list) {
    while (!list.empty()) {
        const std::size_t end = std::min(list.find('|'), list.size());
        if (equal_letters(value, list.substr(0, end))) return true;
        list.remove_prefix(std::min(end + 1, list.size()));
    }
    return false;
}

// Translates one tree after the other, by the keys of its program.
class Translation {
  public:
    explicit Translation(ForeignConfig& config) : config_(config) {}

    void take(const Json& tree, std::span<const ForeignKey> keys, std::string file) {
        keys_ = keys;
        file_ = std::move(file);
        take_section(tree, "");
        name_momentum();
    }

    void set(std::string_view option, std::string value, const std::string& key) {
        const auto given = std::ranges::find(config_.settings, option, &ForeignSetting::option);
        if (given == config_.settings.end()) {
            config_.settings.push_back({std::string(option), std::move(value), key});
            return;
        }
        if (given->value == value) return;
        // A scheduler sets the rate of the optimizer. They have a disk for each thing, and our processes take turns.
        if (option != "lr" && option != "nvme-dir")
            user_error("{}: {} and {} ask for different values of --{}; leave one out", file_, given->key,
                       key, option);
        config_.notes.push_back(fmt::format("--{} is that of {}, not of {}", option, key, given->key));
        *given = {std::string(option), std::move(value), key};
    }

    const std::string& other_file() const { return other_file_; }

  private:
    // DeepSpeed has one name for the momentum of any optimizer, and for Nesterov's, which Muon's is here.
    void name_momentum() {
        const auto find = [&](std::string_view option) {
            return std::ranges::find(config_.settings, option, &ForeignSetting::option);
        };
        const auto optimizer = find("optimizer"), end = config_.settings.end();
        if (optimizer == end || optimizer->value != "muon") return;
        if (const auto momentum = find("momentum"); momentum != end) momentum->option = "muon-momentum";
        if (const auto nesterov = find("nesterov"); nesterov != end && nesterov->value == "true")
            config_.settings.erase(nesterov);
    }

    void take_section(const Json& section, const std::string& parent) {
        const auto enabled = section.find("enabled");
        const bool is_off = enabled != section.end() && enabled->is_boolean() && !enabled->get<bool>();
        for (const auto& [name, value] : section.items()) {
            const std::string key = parent.empty() ? name : fmt::format("{}.{}", parent, name);
            if ((is_off && name != "enabled") || value.is_null() ||
                (value.is_string() && value.get_ref<const std::string&>().empty()) ||
                (value.is_structured() && value.empty()))
                continue;
            if (!value.is_object()) {
                take_value(key, value);
            } else if (!rows_of(key).empty() && !has_keys_in(key)) {
                user_error("{}: {} is a section; give a value", file_, shortened(key));
            } else if (!has_keys_in(key) && !row_of_section(key)) {
                config_.unknown.push_back(shortened(key));
            } else {
                take_section(value, key);
            }
        }
    }

    void take_value(const std::string& key, const Json& value) {
        std::vector<const ForeignKey*> rows = rows_of(key);
        if (rows.empty() && has_keys_in(key)) wrong(key, value, "a section");
        if (rows.empty())
            if (const ForeignKey* const row = row_of_section(key)) rows.push_back(row);
        if (rows.empty()) config_.unknown.push_back(shortened(key));
        for (const ForeignKey* const row : rows) {
            const std::string text = text_of(value);
            if (is_among(text, row->same)) continue;
            if (row->as != KeyAs::ignored && equal_letters(text, "auto")) {
                if (row == rows.front()) config_.automatic.push_back(key);
                continue;
            }
            take(*row, key, value);
        }
    }

    void take(const ForeignKey& row, const std::string& key, const Json& value) {
        const auto whole = [&](std::int64_t least, std::int64_t most, std::string_view what) {
            const std::optional<std::int64_t> number = whole_number_in(value);
            if (!number || *number < least || *number > most) wrong(key, value, what);
            return *number;
        };
        constexpr std::int64_t any = std::int64_t{1} << 50, most_power = 60;
        switch (row.as) {
            case KeyAs::ignored:
                config_.ignored[std::string(row.to)].push_back(key);
                return;
            case KeyAs::whole:
                return set(row.to, fmt::to_string(whole(-any, any, "a whole number")), key);
            case KeyAs::number:
                return set(row.to, number_text(key, value), key);
            case KeyAs::flag:
                if (!is_among(text_of(value), "true|false")) wrong(key, value, "true or false");
                return set(row.to, equal_letters(text_of(value), "true") ? "true" : "false", key);
            case KeyAs::text:
                if (!value.is_string()) wrong(key, value, "a text");
                return set(row.to, value.get<std::string>(), key);
            case KeyAs::choice:
                return take_choice(row, key, value);
            case KeyAs::power_of_two:
                return set(
                    row.to,
                    fmt::to_string(std::int64_t{1} << whole(0, most_power, "a power of two from 0 to 60")),
                    key);
            case KeyAs::betas:
                if (!value.is_array() || value.size() != 2) wrong(key, value, "a list of two numbers");
                set("beta1", number_text(key, value[0]), key);
                return set("beta2", number_text(key, value[1]), key);
            case KeyAs::batch:
                config_.batch = whole(1, any, "a whole number of 1 or more");
                return;
            case KeyAs::accumulation:
                config_.accumulation = whole(1, any, "a whole number of 1 or more");
                return;
            case KeyAs::file:
                if (!value.is_string()) wrong(key, value, "the name of a file");
                other_file_ = value.get<std::string>();
                return;
        }
    }

    void take_choice(const ForeignKey& row, const std::string& key, const Json& value) {
        const std::string text = text_of(value);
        const auto found = std::ranges::find_if(
            row.choices, [&](const KeyChoice& choice) { return equal_letters(choice.theirs, text); });
        if (found == row.choices.end())
            wrong(key, value,
                  fmt::format("one of: {}",
                              fmt::join(row.choices | std::views::transform(&KeyChoice::theirs), ", ")));
        if (found->ours.starts_with('!')) {
            config_.ignored[std::string(found->ours.substr(1))].push_back(key);
        } else if (!found->ours.empty()) {
            set(row.to, std::string(found->ours), key);
        }
    }

    std::string number_text(const std::string& key, const Json& value) const {
        const std::optional<double> number = number_in(value);
        if (!number || !std::isfinite(*number)) wrong(key, value, "a number");
        return fmt::to_string(*number);
    }

    [[noreturn]] void wrong(const std::string& key, const Json& value, std::string_view what) const {
        user_error("{}: {} is {}; give {}", file_, shortened(key), shortened(value.dump()), what);
    }

    std::vector<const ForeignKey*> rows_of(std::string_view key) const {
        std::vector<const ForeignKey*> rows;
        for (const ForeignKey& row : keys_)
            if (row.key == key) rows.push_back(&row);
        return rows;
    }
    bool has_keys_in(const std::string& section) const {
        return std::ranges::any_of(keys_,
                                   [&](const ForeignKey& row) { return row.key.starts_with(section + "."); });
    }
    // That of the innermost section that is taken as a whole.
    const ForeignKey* row_of_section(std::string_view key) const {
        for (std::size_t dot = key.rfind('.'); dot != std::string_view::npos; dot = key.rfind('.')) {
            key = key.substr(0, dot);
            const std::string all = std::string(key) + ".*";
            const auto found = std::ranges::find(keys_, all, &ForeignKey::key);
            if (found != keys_.end()) return &*found;
        }
        return nullptr;
    }

    ForeignConfig& config_;
    std::span<const ForeignKey> keys_;
    std::string file_, other_file_;
};

// How many keys of the top level these are.
std::ptrdiff_t known_keys(const Json& tree, std::span<const ForeignKey> keys) {
    return std::ranges::count_if(tree.items(), [&](const auto& item) {
        return std::ranges::any_of(keys, [&](const ForeignKey& row) {
            return row.key == item.key() || row.key.starts_with(item.key() + ".");
        });
    });
}

// Accelerate reads the sections of the kind of run that the file names.
void drop_other_sections(Json& tree, ForeignConfig& config) {
    if (!tree.contains("distributed_type") || !tree["distributed_type"].is_string()) return;
    const std::string type = tree["distributed_type"].get<std::string>();
    for (const auto& [section, of] : {std::pair("deepspeed_config", "DEEPSPEED"),
                                      {"fsdp_config", "FSDP"},
                                      {"megatron_lm_config", "MEGATRON_LM"}}) {
        if (!tree.contains(section) || equal_letters(type, of)) continue;
        if (!tree[section].empty())
            config.ignored["distributed_type is " + shortened(type)].emplace_back(section);
        tree.erase(section);
    }
}

// What follows from a DeepSpeed configuration as a whole.
void complete_deepspeed(const Json& tree, ForeignConfig& config, Translation& translation) {
    const auto section = tree.find("activation_checkpointing");
    if (section != tree.end() && section->is_object() && !section->empty()) {
        translation.set("recompute", "block", "activation_checkpointing");
        config.notes.emplace_back(
            "activation_checkpointing says how their program recomputes, and its model whether: planned with "
            "--recompute block");
    }
    const bool is_open = std::ranges::any_of(config.automatic, [](const std::string& key) {
        return key == "fp16.enabled" || key == "bf16.enabled" || key == "bfloat16.enabled";
    });
    if (is_open || config.setting("dtype") != nullptr) return;
    translation.set("dtype", "fp32", "fp16.enabled");
    config.notes.emplace_back("neither fp16 nor bf16 is enabled, so their program computes in fp32");
}

void complete_accelerate(const Json& tree, bool has_deepspeed_file, ForeignConfig& config,
                         Translation& translation) {
    const std::string type = tree.contains("distributed_type") ? text_of(tree["distributed_type"]) : "";
    const std::string_view stage = equal_letters(type, "FSDP")                               ? "3"
                                   : equal_letters(type, "DEEPSPEED") && !has_deepspeed_file ? "2"
                                                                                             : "";
    if (!stage.empty() && config.setting("zero-stage") == nullptr)
        translation.set("zero-stage", std::string(stage), "distributed_type");
    if (const ForeignSetting* const device = config.setting("device"); device && device->value == "cpu")
        for (ForeignSetting& setting : config.settings)
            if (setting.option == "gpus") setting.option = "processes";
}

// A file that Accelerate looks for where it is started, or beside the one that names it.
std::string found_file(const std::string& name, const std::filesystem::path& beside) {
    const std::filesystem::path other = beside.parent_path() / name;
    return std::filesystem::exists(name) || !std::filesystem::exists(other) ? name : other.string();
}

}  // namespace

const ForeignSetting* ForeignConfig::setting(std::string_view option) const {
    const auto found = std::ranges::find(settings, option, &ForeignSetting::option);
    return found == settings.end() ? nullptr : &*found;
}

ForeignConfig read_foreign_config(const std::string& file) {
    ForeignConfig config;
    config.file = file;
    Json tree = read_config_tree(file);
    const auto of_deepspeed = known_keys(tree, deepspeed_keys()),
               of_accelerate = known_keys(tree, accelerate_keys());
    if (of_deepspeed + of_accelerate == 0)
        user_error("{}: it has no key of DeepSpeed's or Accelerate's configurations; its first is '{}'", file,
                   shortened(tree.items().begin().key()));
    Translation translation(config);
    if (of_deepspeed >= of_accelerate) {
        translation.take(tree, deepspeed_keys(), file);
        complete_deepspeed(tree, config, translation);
        return config;
    }
    drop_other_sections(tree, config);
    translation.take(tree, accelerate_keys(), file);
    const std::string other = translation.other_file();
    if (!other.empty()) {
        const std::string name = found_file(other, file);
        const Json more = naming_option(file + ": deepspeed_config.deepspeed_config_file",
                                        [&] { return read_config_tree(name); });
        translation.take(more, deepspeed_keys(), name);
        complete_deepspeed(more, config, translation);
    }
    complete_accelerate(tree, !other.empty(), config, translation);
    return config;
}

}  // namespace llmc
