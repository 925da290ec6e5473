// Numbers and names as text for people.
#pragma once

#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

namespace llmc {

// "3.2 MiB". Takes a double because absurd sizes exceed 64 bits.
std::string human_bytes(double bytes);
template <std::integral T>
std::string human_bytes(T bytes) {
    return human_bytes(static_cast<double>(bytes));
}
// "4,808,704"; beyond 15 digits "1.2e+20".
std::string human_count(double number);
// "1,234,567"
std::string grouped(std::int64_t number);
// "12.34568", or "1.235e+10" if that is longer than `width`.
std::string fitted(double number, int decimals, std::size_t width);
// "1 process", "2 processes"
std::string plural(std::int64_t count, std::string_view singular, std::string_view ending = "s");

// The number that the whole text gives in decimal digits. Empty if the text is not a number or does not fit
// in T.
template <std::integral T>
std::optional<T> whole_number(std::string_view text) {
    T number{};
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && rest == end ? std::optional(number) : std::nullopt;
}

// "70B", "15.6T", "124M", "8k" or "7e9": a count, of which T, B, M and k are 1e12, 1e9, 1e6 and 1e3.
std::optional<double> parse_count(std::string_view text);
// "24GiB", "512GB", "80e9": bytes. GB is 1e9, GiB 2^30; so are KB, MB, TB, KiB, MiB and TiB.
std::optional<double> parse_bytes(std::string_view text);

// The name that a user who wrote `given` probably meant; empty if none is similar. The first choice is the
// name that equals the initials of `given` ("lr" if the user wrote "learning-rate"). Then comes the shortest
// name that begins with `given`, then the shortest that contains it. Otherwise it is the name with the fewest
// insertions, deletions and replacements of a character. Ties go to the first.
std::string nearest_name(std::string_view given, std::span<const std::string> names);

// "1.25 ms", "37.5 us", "120 s": at least three digits.
std::string human_seconds(double seconds);
// "0:52", "1:02:03", "2 d 3:04:05"
std::string clock_time(double seconds);

// The text on one line: line ends and other control characters become spaces.
std::string one_line(std::string_view text);

// The names of an enumeration's values.

// Returns the name of `value`; `names` are the names of all values, in order.
template <class Enum, class... Names>
constexpr std::string_view name_among(Enum value, const Names&... names) {
    const std::array<std::string_view, sizeof...(names)> all = {names...};
    const auto place = static_cast<std::size_t>(value);
    return place < all.size() ? all[place] : "?";
}

// Text as bytes of UTF-8 (RFC 3629).

inline constexpr char32_t replacement_character = 0xfffd;
inline constexpr std::string_view replacement_bytes = "\xef\xbf\xbd";

struct Utf8Character {
    char32_t code;       // replacement_character for invalid bytes
    std::size_t length;  // in bytes; for invalid bytes, those that one replacement stands for
    bool is_valid;
    bool is_cut_off = false;  // invalid, but more bytes after the text's end could make it valid
};

// The first character of a nonempty text. Invalid bytes are taken together as long as they could begin a
// character, and are at least one. This is Unicode's "maximal subpart", which Python's errors="replace" uses
// too.
inline Utf8Character first_character(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned first = byte(0);
    if (first < 0x80) return {first, 1, true};
    // Continuation bytes are 0x80 to 0xbf. After some first bytes the range of the second is smaller, which
    // excludes overlong forms, surrogates and codes beyond U+10FFFF.
    const std::size_t length = first < 0xc2 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 1;
    const unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    char32_t code = first & (0x7fU >> length);
    for (std::size_t i = 1; i < length; ++i) {
        const bool follows =
            i < text.size() && byte(i) >= (i == 1 ? low : 0x80U) && byte(i) <= (i == 1 ? high : 0xbfU);
        if (!follows) return {replacement_character, i, false, i == text.size()};
        code = code << 6 | (byte(i) & 0x3fU);
    }
    if (length == 1) return {replacement_character, 1, false};
    return {code, length, true};
}

// Whether the whole text is UTF-8.
inline bool is_utf8(std::string_view text) {
    while (!text.empty()) {
        const Utf8Character character = first_character(text);
        if (!character.is_valid) return false;
        text.remove_prefix(character.length);
    }
    return true;
}

// The text with U+FFFD in place of invalid bytes.
inline std::string with_replacements(std::string_view text) {
    std::string valid;
    valid.reserve(text.size());
    while (!text.empty()) {
        const Utf8Character character = first_character(text);
        valid += character.is_valid ? text.substr(0, character.length) : replacement_bytes;
        text.remove_prefix(character.length);
    }
    return valid;
}

}  // namespace llmc
