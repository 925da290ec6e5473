// Text as bytes of UTF-8 (RFC 3629).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace llmc {

inline constexpr char32_t replacement_character = 0xfffd;
inline constexpr std::string_view replacement_bytes = "\xef\xbf\xbd";

struct Utf8Character {
    char32_t code;       // replacement_character where the bytes are none
    std::size_t length;  // in bytes; of bytes that are no character, those that one replacement stands for
    bool is_valid;
    bool is_cut_off = false;  // no character, but with bytes after the text's end it would be one
};

// The first character of a text that is not empty. Of bytes that are not UTF-8 as many are taken together as could have
// begun a character, and at least one (Unicode's "maximal subpart", which Python's errors="replace" takes too).
inline Utf8Character first_character(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned first = byte(0);
    if (first < 0x80) return {first, 1, true};
    // Bytes that follow are 0x80 to 0xbf, but for the second one after a few first ones: no overlong form, no surrogate,
    // nothing beyond U+10FFFF.
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

// Whether all of a text is UTF-8.
inline bool is_utf8(std::string_view text) {
    while (!text.empty()) {
        const Utf8Character character = first_character(text);
        if (!character.is_valid) return false;
        text.remove_prefix(character.length);
    }
    return true;
}

// The text with U+FFFD where its bytes are not UTF-8.
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
