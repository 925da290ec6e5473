#include "llmc/core/text.h"

#include <fmt/format.h>

#include <array>

namespace llmc {

std::string human_bytes(std::size_t bytes) {
    constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    auto value = static_cast<double>(bytes);
    std::size_t unit = 0;
    for (; value >= 1024 && unit + 1 < units.size(); ++unit) value /= 1024;
    return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string grouped(std::int64_t number) {
    std::string text = std::to_string(number);
    for (auto place = static_cast<std::int64_t>(text.size()) - 3; place > (number < 0 ? 1 : 0); place -= 3) {
        text.insert(static_cast<std::size_t>(place), 1, ',');
    }
    return text;
}

std::string plural(std::int64_t count, std::string_view singular, std::string_view ending) {
    return fmt::format("{} {}{}", grouped(count), singular, count == 1 ? "" : ending);
}

}  // namespace llmc
