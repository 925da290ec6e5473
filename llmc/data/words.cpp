#include "llmc/data/words.h"

#include <array>

#include "llmc/core/utf8.h"
#include "llmc/data/unicode_classes.h"

namespace llmc {
namespace {

// Bytes of 's, 'll and the like at the beginning; 0 if there are none.
std::size_t contraction(std::string_view text) {
    if (text[0] != '\'') return 0;
    constexpr std::array<std::string_view, 7> endings = {"s", "t", "re", "ve", "m", "ll", "d"};
    for (const std::string_view ending : endings) {
        if (text.substr(1).starts_with(ending)) return 1 + ending.size();
    }
    return 0;
}

// The first place from `begin` on whose character is not of this class.
std::size_t end_of_run(std::string_view text, std::size_t begin, CharacterClass kind) {
    while (begin < text.size()) {
        const Utf8Character character = first_character(text.substr(begin));
        if (class_of(character.code) != kind) break;
        begin += character.length;
    }
    return begin;
}

// White space up to the next word, which takes the last character with it if that is a space, and leaves it alone if not.
std::size_t white_space(std::string_view text) {
    std::size_t end = 0, last = 0;
    while (end < text.size()) {
        const Utf8Character character = first_character(text.substr(end));
        if (class_of(character.code) != CharacterClass::space) return last > 0 ? last : end;
        last = end;
        end += character.length;
    }
    return end;
}

}  // namespace

std::size_t first_word(std::string_view text) {
    if (const std::size_t length = contraction(text)) return length;
    const std::size_t begin = text[0] == ' ' ? 1 : 0;
    if (begin == text.size()) return begin;
    const CharacterClass kind = class_of(first_character(text.substr(begin)).code);
    return kind == CharacterClass::space ? white_space(text) : end_of_run(text, begin, kind);
}

}  // namespace llmc
