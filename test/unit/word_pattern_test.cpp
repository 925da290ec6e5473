// Patterns that split text into words: each construct on its own. test/python/test_tokenizer.py compares those of real
// tokenizers with Oniguruma's results.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/tokenizer.h"
#include "llmc/data/word_pattern.h"

namespace llmc {
namespace {

using Words = std::vector<std::string>;

// The matches, one after the other; a character between them is a word of its own.
Words words_of(std::string_view pattern, std::string_view text) {
    const WordPattern compiled(pattern);
    Words words;
    for (std::size_t place = 0; place < text.size(); place += words.back().size()) {
        const std::size_t length = compiled.match(text, place);
        words.emplace_back(
            text.substr(place, length > 0 ? length : first_character(text.substr(place)).length));
    }
    return words;
}

std::string refusal_of(std::string_view pattern) {
    try {
        const WordPattern compiled(pattern);
    } catch (const UserError& fault) {
        return fault.what();
    }
    return "";
}

TEST(WordPattern, Gpt2s) {
    const auto words = [](std::string_view text) { return words_of(gpt2_words, text); };
    EXPECT_EQ(words("Hello, world!"), (Words{"Hello", ",", " world", "!"}));
    EXPECT_EQ(words("it's we'll I'LL 's"), (Words{"it", "'s", " we", "'ll", " I", "'", "LL", " '", "s"}));
    EXPECT_EQ(words("a  b\n c \n"), (Words{"a", " ", " b", "\n", " c", " \n"}));
    EXPECT_EQ(words("x1y 22.5"), (Words{"x", "1", "y", " 22", ".", "5"}));
    // No-break and ideographic spaces are white space, but not the space that a word takes with it.
    EXPECT_EQ(words("\xc2\xa0x\xe3\x80\x80 y"), (Words{"\xc2\xa0", "x", "\xe3\x80\x80", " y"}));
    // A letter, a combining mark (no letter), a Roman numeral. Then a letter of Unicode 16.0, and one of
    // 17.0, which is not in the table.
    EXPECT_EQ(words("e\xcc\x81\xe2\x85\xa7"), (Words{"e", "\xcc\x81", "\xe2\x85\xa7"}));
    EXPECT_EQ(words("a\xf0\x90\xb5\x8a"), (Words{"a\xf0\x90\xb5\x8a"}));
    EXPECT_EQ(words("a\xf0\xb2\x8e\xb0"), (Words{"a", "\xf0\xb2\x8e\xb0"}));
}

TEST(WordPattern, RepetitionsGiveBackUnlessTheyArePossessive) {
    EXPECT_EQ(words_of("[ab]*b", "aabab"), (Words{"aabab"}));
    EXPECT_EQ(words_of("[ab]*+b", "aab"), (Words{"a", "a", "b"}));
    EXPECT_EQ(words_of("a?+a", "aa"), (Words{"aa"}));
    EXPECT_EQ(words_of("a?+a", "a"), (Words{"a"}));
    EXPECT_EQ(WordPattern("a?+a").match("a", 0), 0U);
    EXPECT_EQ(WordPattern("a?a").match("a", 0), 1U);
    EXPECT_EQ(words_of("\\p{N}{1,3}", "12345x6"), (Words{"123", "45", "x", "6"}));
    EXPECT_EQ(words_of("a{2}|a{4,}", "aaaaa"), (Words{"aa", "aa", "a"}));
    // It steps back by characters, not by bytes.
    EXPECT_EQ(words_of("\\p{L}+é", "aééb"), (Words{"aéé", "b"}));
}

TEST(WordPattern, ClassesAndCategories) {
    EXPECT_EQ(words_of("[a-c\\-x]+", "abc-xd"), (Words{"abc-x", "d"}));
    EXPECT_EQ(words_of("[^\\s\\p{L}]+", "1+1 a"), (Words{"1+1", " ", "a"}));
    EXPECT_EQ(words_of("[\\S]+",
                       "a\xc2\x85"
                       "b"),
              (Words{"a", "\xc2\x85", "b"}));
    EXPECT_EQ(words_of("\\p{Lu}\\p{Ll}+", "ABcd"), (Words{"A", "Bcd"}));
    EXPECT_EQ(words_of("\\P{L}+", "ab12"), (Words{"a", "b", "12"}));
    EXPECT_EQ(words_of("\\D+", "ab1"), (Words{"ab", "1"}));
    EXPECT_EQ(words_of("[一-龥]+", "a東京b"), (Words{"a", "東京", "b"}));
    EXPECT_EQ(words_of("[\\]a]+", "a]b"), (Words{"a]", "b"}));
    EXPECT_EQ(words_of("\\x{6771}\\n?", "東\n"), (Words{"東\n"}));
}

TEST(WordPattern, GroupsAndWhatMustNotFollow) {
    EXPECT_EQ(words_of("(?i:'s|'ll)|x", "'S'lL'ſx"), (Words{"'S", "'lL", "'ſ", "x"}));
    EXPECT_EQ(words_of("(?i:a)a", "Aaaa"), (Words{"Aa", "aa"}));
    EXPECT_EQ(words_of("(?i:[stmd]|ll)", "S"), (Words{"S"}));
    EXPECT_EQ(words_of("(?i:[k]|ll)", "K"), (Words{"K"}));  // the sign for kelvin
    EXPECT_EQ(words_of("a(?:b|bc)?d", "abcdad"), (Words{"abcd", "ad"}));
    EXPECT_EQ(words_of("\\s+(?!\\S)|\\s+", "  a  "), (Words{" ", " ", "a", "  "}));
    EXPECT_EQ(words_of("(a|b(?!c))d?", "bcbd"), (Words{"b", "c", "bd"}));
}

TEST(WordPattern, AMillionSpaces) {
    const std::string spaces(1'000'000, ' ');
    EXPECT_EQ(WordPattern("\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+").match(spaces + "a", 0), spaces.size() - 1);
}

TEST(WordPattern, RefusesByName) {
    const std::vector<std::pair<const char*, const char*>> cases = {
        {"a+?", "a ? behind a repetition"},
        {"(ab)+", "a group with +"},
        {"(?<=a)b", "a group (?<="},
        {"(?=a)b", "a group (?=a"},
        {"^a", "a ^ that is no character"},
        {"a.b", "a . that is no character"},
        {"\\w+", "\\w"},
        {"(a)\\1", "\\1"},
        {"\\p{Greek}", "\\p{Greek}"},
        {"[a[b]]", "[ in a class"},
        {"[a&&b]", "&& in a class"},
        {"a{1,2}+", "a + behind {..}"},
        {"a{2,1}", "the repetition {2,1"},
        {"[]a]", "an empty class"},
        {"(a", "a ( without a )"},
        {"a)", "a ) without a ("},
        {"[a", "a [ without a ]"},
        {"a\\", "a backslash at the end"},
        {"(?i:é)", "(?i:..) of characters beyond ASCII"},
        {"(?i:d|Fi|is)", "(?i:..) of fi, which one character can be"},
        {"a*", "matches an empty text"},
        {"a|", "matches an empty text"},
        {"", "matches an empty text"},
        {"[z-a]", "a range"},
        {"*a", "a * that is no character"},
        {"(?i:\\p{L})", "in (?i:..)"}};
    for (const auto& [pattern, words] : cases)
        EXPECT_NE(refusal_of(pattern).find(words), std::string::npos)
            << pattern << ": " << refusal_of(pattern);
}

}  // namespace
}  // namespace llmc
