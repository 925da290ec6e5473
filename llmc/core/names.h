// The names of an enumeration's values.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace llmc {

// `names` are those of all values, in their order.
template <class Enum, class... Names>
constexpr std::string_view name_among(Enum value, const Names&... names) {
    const std::array<std::string_view, sizeof...(names)> all = {names...};
    const auto place = static_cast<std::size_t>(value);
    return place < all.size() ? all[place] : "?";
}

}  // namespace llmc
