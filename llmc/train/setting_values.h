// Values of settings of any type: whether a value is set, and whether a text is a valid value. A UserError
// about a value names the option.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {

using Choices = std::vector<std::string>;

// Whether a setting has no value yet.
template <class T>
bool is_unset(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) return value.empty();
    return false;
}
template <class T>
bool is_unset(const std::optional<T>& value) {
    return !value.has_value();
}
template <class T>
const T& value_of(const T& value) {
    return value;
}
template <class T>
const T& value_of(const std::optional<T>& value) {
    return *value;
}

template <class T>
void check_number(std::string_view name, const std::string& text, std::string_view what) {
    constexpr std::string_view example = std::is_same_v<T, double> ? "0.001" : "100";
    T number{};
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(begin, end, number);
    if (error == std::errc::result_out_of_range)
        user_error("--{} {} is too large or too small; give a number such as {}", name, text, example);
    if (error != std::errc() || rest != end)
        user_error("--{}: '{}' is not {}; give a number such as {}", name, text, what, example);
}

// Throws UserError if the text is not a value of the setting's type.
template <class T>
void check_value(std::string_view name, const std::string& text, const T& /*setting*/,
                 const Choices& choices) {
    if constexpr (std::is_same_v<T, std::string>) {
        if (!choices.empty() && std::ranges::find(choices, text) == choices.end()) {
            user_error("--{}: unknown value '{}'; choose one of: {}", name, text, fmt::join(choices, ", "));
        }
        try {
            static_cast<void>(nlohmann::json(text).dump());
        } catch (const nlohmann::json::exception&) {
            user_error("--{}: the text is not valid UTF-8; give it in UTF-8", name);
        }
        if (text.empty() && name != "prompt")
            user_error("--{}: the value is empty; give a value, or leave the option out", name);
    } else if constexpr (std::is_same_v<T, bool>) {
        if (text != "true" && text != "false")
            user_error("--{}: '{}' is neither true nor false; give true or false", name, text);
    } else if constexpr (std::is_same_v<T, double>) {
        check_number<double>(name, text, "a number");
    } else if constexpr (std::is_same_v<T, std::uint64_t>) {
        check_number<T>(name, text, "a whole number of 0 or more");
    } else {
        check_number<T>(name, text, "a whole number");
    }
}
template <class T>
void check_value(std::string_view name, const std::string& text, const std::optional<T>& /*setting*/,
                 const Choices& choices) {
    check_value(name, text, T{}, choices);
}

// Whether a setting's value is text. A configuration file has text in quotation marks.
template <class T>
constexpr bool is_text = std::is_same_v<T, std::string>;

template <class T>
void require_range(const char* name, T value, T lowest, T highest) {
    if (!(value >= lowest && value <= highest)) {
        user_error("--{} {} is out of range; give {} to {}", name, value, lowest, highest);
    }
}

}  // namespace llmc
