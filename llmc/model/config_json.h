// The config.json of a folder in Hugging Face's format. A family (family.h) reads its choices from it, and writes
// them back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

// The longest context by default. Folders name contexts for which few machines have memory.
inline constexpr std::int64_t longest_default_context = 2048;

// Reads values, and notices which keys nobody has asked for. A missing key and null have the default; what is
// wrong is a UserError that names the file and the key.
class ConfigReader {
  public:
    // `name` is the file's, for messages; `context` is --seq-len, if it is given.
    ConfigReader(const nlohmann::ordered_json& config, std::string name,
                 std::optional<std::int64_t> context = {})
        : config_(config), name_(std::move(name)), context_(context) {}

    // The context of the run, for a model with this longest one.
    std::int64_t context(std::int64_t longest) const {
        return context_.value_or(std::min(longest, longest_default_context));
    }

    bool has(std::string_view key);    // and is not null
    bool names(std::string_view key);  // perhaps as null
    // A whole number of 1 or more; `missing` 0: the key is required.
    std::int64_t size(std::string_view key, std::int64_t missing = 0);
    double number(std::string_view key, double missing);
    bool is_on(std::string_view key, bool missing);
    std::string text(std::string_view key, const std::string& missing);
    // UserError if a key is there, and has neither null nor one of these values: this program computes only them.
    void require(std::string_view key, const std::vector<nlohmann::ordered_json>& computed);
    // The elements of an array; none without the key.
    std::vector<std::string> texts(std::string_view key);
    // The object of a key; empty if there is none.
    nlohmann::ordered_json object(std::string_view key);
    const std::string& name() const { return name_; }
    [[noreturn]] void refuse(std::string_view key, std::string_view why) const;

    // One note about dropout, and one with the keys that nobody has asked for; empty without them.
    std::vector<std::string> notes() const;

  private:
    const nlohmann::ordered_json* find(std::string_view key);

    const nlohmann::ordered_json& config_;
    std::string name_;
    std::optional<std::int64_t> context_;
    std::set<std::string, std::less<>> asked_;
};

// Changes the keys of a config.json that say something else. A new one gets all keys.
class ConfigWriter {
  public:
    explicit ConfigWriter(nlohmann::ordered_json& config) : config_(config), is_new_(config.empty()) {}

    bool is_new() const { return is_new_; }
    // `missing` is the value that a key has where it is not given; without it, there is none.
    void set(const std::string& key, const nlohmann::ordered_json& value,
             const std::optional<nlohmann::ordered_json>& missing = {});
    // Only if the key is there and is not null.
    void correct(const std::string& key, const nlohmann::ordered_json& value);
    // Only in a new config.json.
    void set_new(const std::string& key, const nlohmann::ordered_json& value) {
        if (is_new_) config_[key] = value;
    }

  private:
    nlohmann::ordered_json& config_;
    bool is_new_;
};

}  // namespace llmc
