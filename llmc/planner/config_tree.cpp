#include "llmc/planner/config_tree.h"

#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

// Far more than any configuration has. An alias of YAML counts as what it stands for, so few lines may be many values.
constexpr std::size_t most_bytes = 1 << 20;
constexpr int most_levels = 32, most_values = 10000;

[[noreturn]] void refuse_deep() { user_error("it has more than {} levels", most_levels); }

// The parser itself takes the last of two values.
Json parse_json(const std::string& text) {
    std::map<int, std::set<std::string>> keys;
    const auto inspect = [&](int depth, Json::parse_event_t event, Json& parsed) {
        if (depth > most_levels) refuse_deep();
        if (event == Json::parse_event_t::object_start) keys[depth + 1].clear();
        if (event == Json::parse_event_t::key && !keys[depth].insert(parsed.get<std::string>()).second)
            user_error("'{}' is given twice; leave one out", one_line(parsed.get<std::string>()));
        return true;
    };
    try {
        return Json::parse(text, inspect, /*allow_exceptions*/ true, /*ignore_comments*/ true);
    } catch (const Json::exception& fault) {
        const std::string what =
            one_line(fault.what());  // "[json.exception.parse_error.101] parse error at line 1, ..."
        user_error("{}", what.substr(std::min(what.find("] ") + 2, what.size())));
    }
}

template <class Number>
std::optional<Json> number_in(std::string_view text) {
    Number number{};
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || rest != text.data() + text.size()) return std::nullopt;
    return number;
}

Json scalar_of(const YAML::Node& node) {
    const std::string& text = node.Scalar();
    if (node.Tag() == "!") return text;  // it stands in quotation marks
    std::string small = text;
    std::ranges::transform(small, small.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
    if (small.empty() || small == "~" || small == "null") return nullptr;
    for (const auto& [word, value] : {std::pair("true", true),
                                      {"yes", true},
                                      {"on", true},
                                      {"false", false},
                                      {"no", false},
                                      {"off", false}})
        if (small == word) return value;
    if (const auto whole = number_in<std::int64_t>(text)) return *whole;
    if (const auto number = number_in<double>(text)) return *number;
    return text;
}

Json converted(const YAML::Node& node, int level, int& values) {
    if (level > most_levels) refuse_deep();
    if (++values > most_values) user_error("it has more than {} values", most_values);
    if (node.IsScalar()) return scalar_of(node);
    if (node.IsSequence()) {
        Json list = Json::array();
        for (const YAML::Node& item : node) list.push_back(converted(item, level + 1, values));
        return list;
    }
    if (!node.IsMap()) return nullptr;
    Json object = Json::object();
    for (const auto& item : node) {
        if (!item.first.IsScalar()) user_error("it has a key that is not a text");
        const std::string& key = item.first.Scalar();
        if (object.contains(key)) user_error("'{}' is given twice; leave one out", one_line(key));
        object[key] = converted(item.second, level + 1, values);
    }
    return object;
}

Json parse_yaml(const std::string& text) {
    try {
        const std::vector<YAML::Node> documents = YAML::LoadAll(text);
        if (documents.size() > 1) user_error("it has {} documents; give one", documents.size());
        int values = 0;
        return documents.empty() ? Json() : converted(documents.front(), 0, values);
    } catch (const YAML::DeepRecursion&) {
        refuse_deep();
    } catch (const YAML::Exception& fault) {
        user_error("line {}: {}", fault.mark.line + 1, one_line(fault.msg));
    }
}

}  // namespace

nlohmann::ordered_json read_config_tree(const std::string& file) {
    const std::string text = read_file(file);
    return naming_option(file, [&] {
        if (text.size() > most_bytes)
            user_error("it has {} bytes; a configuration has {} at most", text.size(), most_bytes);
        if (!is_utf8(text)) user_error("it is not valid UTF-8");
        const std::size_t begin = text.find_first_not_of(" \t\r\n");
        if (begin == std::string::npos)
            user_error("it is empty; give a configuration of DeepSpeed or Accelerate");
        const bool is_yaml = file.ends_with(".yaml") || file.ends_with(".yml");
        const Json tree =
            file.ends_with(".json") || (!is_yaml && text[begin] == '{') ? parse_json(text) : parse_yaml(text);
        if (!tree.is_object() || tree.empty())
            user_error("it has no keys; give a configuration of DeepSpeed or Accelerate");
        return tree;
    });
}

}  // namespace llmc
