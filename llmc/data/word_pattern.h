// The regular expressions with which tokenizers split text into words, compiled. Syntax and meaning are those of
// Oniguruma, the library of PyPI's `tokenizers`; what follows is all that patterns may use:
//
//   a  \n \r \t  \x{4e00}    a character; a backslash before punctuation makes it an ordinary one
//   \s \S \d \D \p{..} \P{..}  white space, decimal digits, a general category such as Lu or a group of them such as L
//   [..] [^..]               a class of characters, ranges and the escapes above
//   X? X* X+ X{m,n}          greedy repetitions of a character or a class
//   X?+ X*+ X++              possessive ones, which never give back what they took
// (..) (?:..) (?i:..)      groups, whose alternatives are separated by |; (?i: is for ASCII letters; a group may have
// a ?
//   (?!..)                   what follows must not match
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace llmc {

// A set of characters: of some general categories, or in some ranges.
struct CharacterSet {
    std::uint32_t categories = 0;  // a bit for each
    std::vector<std::pair<char32_t, char32_t>> ranges;
    bool is_negated = false;

    bool contains(char32_t code) const;
};

class WordPattern {
  public:
    // UserError that names what the pattern has and this class does not know, or if it matches nothing at all.
    explicit WordPattern(std::string_view pattern);

    // The number of bytes that the pattern matches at `place` of a text, which must be valid UTF-8; 0 if it does not.
    std::size_t match(std::string_view text, std::size_t place) const;

  private:
    friend class PatternParser;

    // A character, or a choice between several ways to go on.
    enum class Kind : std::uint8_t { accept, characters, choice, forbid };
    struct Node {
        Kind kind = Kind::accept;
        bool is_possessive = false;
        std::size_t least = 1, most = 1;  // repetitions of `characters`
        CharacterSet characters = {};
        // Of `choice`, in the order in which they are tried; what `forbid` forbids.
        std::vector<std::size_t> ways = {};
        std::size_t next = 0;  // the node behind this one
    };

    // Where a match that begins with the node `at` ends; npos if there is none.
    std::size_t end_of_match(std::size_t at, std::string_view text, std::size_t place) const;

    std::vector<Node> nodes_;  // the first one accepts
    std::size_t begin_ = 0;
};

}  // namespace llmc
