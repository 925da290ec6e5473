#include "llmc/data/word_pattern.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/unicode_classes.h"

namespace llmc {
namespace {

constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
constexpr std::string_view category_names =
    "Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co ";
constexpr std::uint32_t all_categories = (1U << 30) - 1;

constexpr std::uint32_t bit(Category category) { return 1U << static_cast<unsigned>(category); }

// A category's name is two letters, a group's the first of them; 0 if there is none of this name.
std::uint32_t categories_named(std::string_view name) {
    std::uint32_t found = 0;
    for (std::size_t i = 0; 3 * i < category_names.size(); ++i) {
        const std::string_view category = category_names.substr(3 * i, 2);
        if (!name.empty() && (name == category || (name.size() == 1 && category[0] == name[0])))
            found |= 1U << i;
    }
    return found;
}

constexpr std::uint32_t separators = bit(Category::Zs) | bit(Category::Zl) | bit(Category::Zp);
// White space is the separators and these controls.
const CharacterSet white_space = {separators, {{0x9, 0xd}, {0x85, 0x85}}};
const CharacterSet no_white_space = {all_categories & ~separators & ~bit(Category::Cc),
                                     {{0x0, 0x8}, {0xe, 0x1f}, {0x7f, 0x84}, {0x86, 0x9f}}};

bool is_letter(char32_t code) { return (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z'); }

// Adds the characters that differ from those of a set in their case only.
void fold_case(CharacterSet& set) {
    const std::vector<std::pair<char32_t, char32_t>> ranges = set.ranges;
    for (const auto& [first, last] : ranges) {
        if (last > 0x7f) user_error("it has (?i:..) of characters beyond ASCII");
        for (char32_t code = first; code <= last; ++code) {
            if (!is_letter(code)) continue;
            set.ranges.emplace_back(code ^ 0x20, code ^ 0x20);
            const char32_t lower = code | 0x20;
            // The long s and the sign for kelvin.
            if (lower == 's') set.ranges.emplace_back(0x17f, 0x17f);
            if (lower == 'k') set.ranges.emplace_back(0x212a, 0x212a);
        }
    }
}

}  // namespace

bool CharacterSet::contains(char32_t code) const {
    const bool is_in = (categories >> static_cast<unsigned>(category_of(code)) & 1U) != 0 ||
                       std::ranges::any_of(ranges, [code](const auto& range) {
                           return code >= range.first && code <= range.second;
                       });
    return is_in != is_negated;
}

// Reads a pattern from its beginning; the nodes of what follows are not known yet, so `next` is set behind them.
class PatternParser {
  public:
    PatternParser(std::string_view pattern, WordPattern& out) : rest_(pattern), out_(out) {}

    void parse() {
        out_.nodes_.emplace_back();
        const Part all = parse_alternatives();
        if (!rest_.empty()) refuse("a ) without a (");
        out_.begin_ = all.begin;
        finish(all, 0);
    }

  private:
    using Node = WordPattern::Node;
    using Kind = WordPattern::Kind;
    // A piece of the pattern: its first node, and the nodes behind which the pattern goes on.
    struct Part {
        std::size_t begin;
        std::vector<std::size_t> ends;
    };

    [[noreturn]] static void refuse(std::string_view what) { user_error("it has {}", what); }

    std::size_t add(Node node) {
        out_.nodes_.push_back(std::move(node));
        return out_.nodes_.size() - 1;
    }
    void finish(const Part& part, std::size_t next) {
        for (const std::size_t end : part.ends) out_.nodes_[end].next = next;
    }
    // A node that goes on at once.
    Part nothing() {
        const std::size_t node = add({.kind = Kind::choice});
        return {node, {node}};
    }

    bool take(std::string_view text) {
        if (!rest_.starts_with(text)) return false;
        rest_.remove_prefix(text.size());
        return true;
    }
    char32_t take_character() {
        const Utf8Character character = first_character(rest_);
        rest_.remove_prefix(character.length);
        return character.code;
    }

    Part parse_alternatives() {
        std::vector<Part> ways = {parse_sequence()};
        while (take("|")) ways.push_back(parse_sequence());
        if (ways.size() == 1) return ways[0];
        Node node{.kind = Kind::choice};
        Part all{0, {}};
        for (const Part& way : ways) {
            node.ways.push_back(way.begin);
            all.ends.insert(all.ends.end(), way.ends.begin(), way.ends.end());
        }
        all.begin = add(std::move(node));
        return all;
    }

    Part parse_sequence() {
        std::optional<Part> all;
        while (!rest_.empty() && rest_[0] != '|' && rest_[0] != ')') {
            const Part item = parse_item();
            if (all) {
                finish(*all, item.begin);
                all->ends = item.ends;
            } else {
                all = item;
            }
        }
        return all ? *all : nothing();
    }

    Part parse_item() {
        if (take("(")) return parse_group();
        Node node{.kind = Kind::characters, .characters = parse_characters()};
        if (ignores_case_) fold_case(node.characters);
        parse_repetition(node);
        const std::size_t place = add(std::move(node));
        return {place, {place}};
    }

    Part parse_group() {
        const bool is_outside = !ignores_case_, forbids = take("?!");
        if (!forbids && !take("?:") && take("?i:")) ignores_case_ = true;
        if (ignores_case_) refuse_ligatures(rest_.substr(0, rest_.find(')')));
        if (rest_.starts_with('?')) refuse(fmt::format("a group (?{}", rest_.substr(1, 2)));
        Part inner = parse_alternatives();
        if (!take(")")) refuse("a ( without a )");
        if (is_outside) ignores_case_ = false;
        if (forbids) {
            finish(inner, 0);
            const std::size_t node = add({.kind = Kind::forbid, .ways = {inner.begin}});
            return {node, {node}};
        }
        const bool is_optional = take("?");
        if (!rest_.empty() && std::string_view("*+?{").find(rest_[0]) != std::string_view::npos)
            refuse(fmt::format("a group with {}", rest_.substr(0, 1)));
        if (!is_optional) return inner;
        const Part otherwise = nothing();
        Part all{add({.kind = Kind::choice, .ways = {inner.begin, otherwise.begin}}), inner.ends};
        all.ends.push_back(otherwise.begin);
        return all;
    }

    // Without regard to case these letters are also one character: ß, ﬀ, ﬁ, ﬂ, ﬆ.
    void refuse_ligatures(std::string_view group) {
        std::string letters;
        bool is_class = false;  // of which one character matches
        for (const char c : group) {
            is_class = is_class ? c != ']' : c == '[';
            letters += is_class ? ' ' : c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
        }
        for (const char* const pair : {"ss", "ff", "fi", "fl", "st"})
            if (letters.find(pair) != std::string::npos)
                refuse(fmt::format("(?i:..) of {}, which one character can be", pair));
    }

    void parse_repetition(Node& node) {
        if (rest_.empty()) return;
        if (take("?")) {
            node.least = 0;
        } else if (take("*")) {
            node.least = 0;
            node.most = unlimited;
        } else if (take("+")) {
            node.most = unlimited;
        } else if (take("{")) {
            parse_limits(node);
            if (rest_.starts_with('+')) refuse("a + behind {..}");
        } else {
            return;
        }
        node.is_possessive = take("+");
        if (!rest_.empty() && std::string_view("*?{").find(rest_[0]) != std::string_view::npos)
            refuse(fmt::format("a {} behind a repetition", rest_.substr(0, 1)));
    }

    // m}, m,} or m,n}
    void parse_limits(Node& node) {
        const std::size_t end = rest_.find('}');
        const std::string_view limits = rest_.substr(0, end), least = limits.substr(0, limits.find(','));
        const std::string_view most = least.size() == limits.size() ? least : limits.substr(least.size() + 1);
        const auto low = whole_number<std::uint16_t>(least);
        const auto high = most.empty() ? std::optional(unlimited) : whole_number<std::size_t>(most);
        if (end == std::string_view::npos || !low || !high || *high < *low || *high == 0)
            refuse(fmt::format("the repetition {{{}", limits));
        node.least = *low;
        node.most = *high;
        rest_.remove_prefix(end + 1);
    }

    CharacterSet parse_characters() {
        if (take("[")) return parse_class();
        if (rest_[0] == '\\') return parse_escape();
        if (std::string_view("^$.*+?{").find(rest_[0]) != std::string_view::npos)
            refuse(fmt::format("a {} that is no character", rest_.substr(0, 1)));
        const char32_t code = take_character();
        return {0, {{code, code}}};
    }

    CharacterSet parse_class() {
        CharacterSet set;
        set.is_negated = take("^");
        if (rest_.starts_with(']')) refuse("an empty class");
        while (!rest_.starts_with(']')) {
            if (rest_.empty()) refuse("a [ without a ]");
            if (rest_[0] == '[' || rest_.starts_with("&&"))
                refuse(fmt::format("{} in a class", rest_.substr(0, rest_[0] == '&' ? 2 : 1)));
            add_to_class(set);
        }
        take("]");
        return set;
    }

    void add_to_class(CharacterSet& set) {
        const CharacterSet one = class_item();
        const auto is_character = [](const CharacterSet& of) {
            return of.categories == 0 && of.ranges.size() == 1 && of.ranges[0].first == of.ranges[0].second;
        };
        if (rest_.starts_with('-') && !rest_.starts_with("-]")) {
            take("-");
            if (rest_.empty()) refuse("a [ without a ]");
            const CharacterSet other = class_item();
            if (!is_character(one) || !is_character(other) || other.ranges[0].first < one.ranges[0].first)
                refuse("a range in a class that is not between two characters");
            set.ranges.emplace_back(one.ranges[0].first, other.ranges[0].first);
            return;
        }
        set.categories |= one.categories;
        set.ranges.insert(set.ranges.end(), one.ranges.begin(), one.ranges.end());
    }

    CharacterSet class_item() {
        if (rest_[0] == '\\') return parse_escape();
        const char32_t code = take_character();
        return {0, {{code, code}}};
    }

    // The text of \p{..} and \x{..} in its braces.
    std::string_view take_braces() {
        const std::size_t end = rest_.find('}');
        if (!take("{") || end == std::string_view::npos) refuse("a \\p or \\x without {..}");
        const std::string_view inner = rest_.substr(0, end - 1);
        rest_.remove_prefix(end);
        return inner;
    }

    CharacterSet parse_escape() {
        take("\\");
        if (rest_.empty()) refuse("a backslash at the end");
        const char32_t code = take_character();
        constexpr std::array<std::pair<char32_t, char32_t>, 5> controls = {
            {{'n', '\n'}, {'r', '\r'}, {'t', '\t'}, {'f', '\f'}, {'v', '\v'}}};
        for (const auto& [letter, control] : controls)
            if (code == letter) return {0, {{control, control}}};
        switch (code) {
            case 's':
                return white_space;
            case 'S':
                return no_white_space;
            case 'd':
                return {bit(Category::Nd), {}};
            case 'D':
                return {all_categories & ~bit(Category::Nd), {}};
            case 'p':
            case 'P': {
                if (ignores_case_) refuse("a \\p{..} in (?i:..)");
                const std::string_view name = take_braces();
                const std::uint32_t categories = categories_named(name);
                if (categories == 0) refuse(fmt::format("\\p{{{}}}, which is no general category", name));
                return {code == 'p' ? categories : all_categories & ~categories, {}};
            }
            case 'x': {
                const std::string_view digits = take_braces();
                std::uint32_t number = 0;
                const auto [end, error] = std::from_chars(digits.begin(), digits.end(), number, 16);
                if (error != std::errc() || end != digits.end() || number > 0x10ffff)
                    refuse(fmt::format("\\x{{{}}}, which is no character", digits));
                return {0, {{number, number}}};
            }
            default:
                break;
        }
        if (code < 0x80 && (is_letter(code) || (code >= '0' && code <= '9')))
            refuse(fmt::format("\\{}", static_cast<char>(code)));
        return {0, {{code, code}}};
    }

    std::string_view rest_;
    WordPattern& out_;
    bool ignores_case_ = false;
};

WordPattern::WordPattern(std::string_view pattern) {
    PatternParser(pattern, *this).parse();
    if (end_of_match(begin_, "", 0) != std::string_view::npos) user_error("it matches an empty text");
}

std::size_t WordPattern::match(std::string_view text, std::size_t place) const {
    const std::size_t end = end_of_match(begin_, text, place);
    return end == std::string_view::npos ? 0 : end - place;
}

// Backtracking: of the ways to go on, the first that leads to a match counts. Only a choice and characters that others
// want too are tried again, so the depth is at most the length of the pattern.
std::size_t WordPattern::end_of_match(std::size_t at, std::string_view text, std::size_t place) const {
    while (true) {
        const Node& node = nodes_[at];
        at = node.next;
        switch (node.kind) {
            case Kind::accept:
                return place;
            case Kind::forbid:
                if (end_of_match(node.ways[0], text, place) != std::string_view::npos)
                    return std::string_view::npos;
                break;
            case Kind::choice:
                if (node.ways.empty()) break;
                for (std::size_t i = 0; i + 1 < node.ways.size(); ++i) {
                    const std::size_t end = end_of_match(node.ways[i], text, place);
                    if (end != std::string_view::npos) return end;
                }
                at = node.ways.back();
                break;
            case Kind::characters: {
                std::size_t count = 0;
                for (; count < node.most && place < text.size(); ++count) {
                    const Utf8Character character = first_character(text.substr(place));
                    if (!node.characters.contains(character.code)) break;
                    place += character.length;
                }
                if (count < node.least) return std::string_view::npos;
                if (node.is_possessive) break;
                for (; count > node.least; --count) {
                    const std::size_t end = end_of_match(at, text, place);
                    if (end != std::string_view::npos) return end;
                    do --place;
                    while ((static_cast<unsigned char>(text[place]) & 0xc0U) == 0x80);
                }
                break;
            }
        }
    }
}

}  // namespace llmc
