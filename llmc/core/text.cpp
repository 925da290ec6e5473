#include "llmc/core/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

namespace llmc {

std::string human_bytes(double bytes) {
    constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    std::size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < units.size(); ++unit) bytes /= 1024;
    if (unit == 0) return fmt::format("{} B", bytes);
    return bytes < 1e4 ? fmt::format("{:.1f} {}", bytes, units[unit])
                       : fmt::format("{} {}", human_count(bytes), units[unit]);
}

std::string human_count(double number) {
    return number < 1e15 ? grouped(static_cast<std::int64_t>(number)) : fmt::format("{:.1e}", number);
}

std::string grouped(std::int64_t number) {
    std::string text = std::to_string(number);
    for (auto place = static_cast<std::int64_t>(text.size()) - 3; place > (number < 0 ? 1 : 0); place -= 3) {
        text.insert(static_cast<std::size_t>(place), 1, ',');
    }
    return text;
}

std::string fitted(double number, int decimals, std::size_t width) {
    const std::string text = fmt::format("{:.{}f}", number, decimals);
    return text.size() <= width ? text : fmt::format("{:.3e}", number);
}

std::string human_seconds(double seconds) {
    constexpr std::array units = {"s", "ms", "us", "ns"};
    std::size_t unit = 0;
    for (; seconds != 0 && std::abs(seconds) < 1 && unit + 1 < units.size(); ++unit) seconds *= 1000;
    const double size = std::abs(seconds);
    return fmt::format("{:.{}f} {}", seconds, size < 10 ? 2 : size < 100 ? 1 : 0, units[unit]);
}

std::string plural(std::int64_t count, std::string_view singular, std::string_view ending) {
    return fmt::format("{} {}{}", grouped(count), singular, count == 1 ? "" : ending);
}

namespace {

// A number and the unit behind it, which has one of the names in `units`, or none.
std::optional<double> with_unit(std::string_view text,
                                std::initializer_list<std::pair<std::string_view, double>> units) {
    double number{};
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc()) return std::nullopt;
    const std::string_view unit = text.substr(static_cast<std::size_t>(rest - text.data()));
    if (unit.empty()) return number;
    for (const auto& [name, size] : units)
        if (unit == name) return number * size;
    return std::nullopt;
}

}  // namespace

std::optional<double> parse_count(std::string_view text) {
    return with_unit(text, {{"k", 1e3}, {"K", 1e3}, {"M", 1e6}, {"B", 1e9}, {"T", 1e12}});
}

std::optional<double> parse_bytes(std::string_view text) {
    return with_unit(text, {{"B", 1},
                            {"KB", 1e3},
                            {"MB", 1e6},
                            {"GB", 1e9},
                            {"TB", 1e12},
                            {"KiB", 0x1p10},
                            {"MiB", 0x1p20},
                            {"GiB", 0x1p30},
                            {"TiB", 0x1p40}});
}

namespace {

// Levenshtein distance, computed one row of the table at a time.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i + 1;
        for (std::size_t j = 0; j < b.size(); ++j) {
            const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
        }
    }
    return row.back();
}

// "lr" for "learning-rate".
std::string initials(std::string_view name) {
    std::string letters;
    for (std::size_t i = 0; i < name.size(); ++i) {
        if (name[i] != '-' && (i == 0 || name[i - 1] == '-')) letters += name[i];
    }
    return letters;
}

}  // namespace

std::string nearest_name(std::string_view given, std::span<const std::string> names) {
    if (given.empty() || names.empty()) return "";
    // In the spelling of option names: --Learning_Rate becomes learning-rate.
    std::string name(given);
    std::ranges::transform(name, name.begin(), [](unsigned char c) {
        return c == '_' ? '-' : static_cast<char>(std::tolower(c));
    });
    const auto abbreviated = std::ranges::find(names, initials(name));
    if (abbreviated != names.end() && abbreviated->size() > 1) return *abbreviated;
    const auto cost = [&](const std::string& known) {
        const bool within = name.size() > 2 && known.find(name) != std::string::npos;
        return std::tuple(!known.starts_with(name), !within, edit_distance(name, known));
    };
    const std::string& nearest = *std::ranges::min_element(names, {}, cost);
    const auto [other_beginning, not_within, changes] = cost(nearest);
    // If half of the letters differ, it is not a typing error.
    return other_beginning && not_within && 2 * changes >= std::max(name.size(), nearest.size()) ? ""
                                                                                                 : nearest;
}

std::string one_line(std::string_view text) {
    std::string line(text);
    std::ranges::replace_if(
        line, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
    return line;
}

std::string clock_time(double seconds) {
    const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
    const std::int64_t minutes = whole / 60, hours = minutes / 60, days = hours / 24;
    if (days > 0) return fmt::format("{} d {}:{:02}:{:02}", days, hours % 24, minutes % 60, whole % 60);
    if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes % 60, whole % 60);
    return fmt::format("{}:{:02}", minutes, whole % 60);
}

}  // namespace llmc
