// Numbers as a person reads and writes them.
#pragma once

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

// "3.2 MiB"; in double, since what absurd sizes would take leaves 64 bits.
std::string human_bytes(double bytes);
template <std::integral T>
std::string human_bytes(T bytes) {
    return human_bytes(static_cast<double>(bytes));
}
// "4,808,704", and beyond 15 digits "1.2e+20".
std::string human_count(double number);
// "1,234,567"
std::string grouped(std::int64_t number);
// "12.34568", or "1.235e+10" where that has more characters than `width`.
std::string fitted(double number, int decimals, std::size_t width);
// "1 process", "2 processes"
std::string plural(std::int64_t count, std::string_view singular, std::string_view ending = "s");

// What the whole text says in decimal digits; nothing where it says something else, or more than a T holds.
template <std::integral T>
std::optional<T> whole_number(std::string_view text) {
    T number{};
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && rest == end ? std::optional(number) : std::nullopt;
}

// The name that someone who wrote `given` may have meant: the shortest that begins with it or has it within, or else the
// one that takes the fewest insertions, deletions and replacements of a character; the first of several such. Empty if
// none is like it.
std::string nearest_name(std::string_view given, std::span<const std::string> names);

// "1.25 ms", "37.5 us", "120 s": three digits or more.
std::string human_seconds(double seconds);
// "0:52", "1:02:03", "2 d 3:04:05"
std::string clock_time(double seconds);

// On one line: line ends and other control characters become spaces.
std::string one_line(std::string_view text);

}  // namespace llmc
