#include "llmc/data/tokenizer.h"

#include <fmt/format.h>
#include <utf8proc.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/unicode_classes.h"

namespace llmc {
namespace {

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

// `tokenizers` finds digits by a newer Unicode than letters.
constexpr std::string_view digits = R"([\p{N}\x{11de0}-\x{11de9}\x{16ff4}-\x{16ff6}])";

WordPattern compiled(const WordRule& rule) {
    switch (rule.kind) {
        case WordRule::Kind::digits:
            return WordPattern(fmt::format("{}{}", digits, rule.is_individual ? "" : "+"));
        case WordRule::Kind::pattern:
            return WordPattern(rule.text);
        case WordRule::Kind::text:
            break;
    }
    std::string pattern;
    for (const char c : rule.text) {
        const auto code = static_cast<unsigned char>(c);
        if (code < 0x80) {
            pattern += fmt::format("\\x{{{:x}}}", code);
        } else {
            pattern += c;
        }
    }
    return WordPattern(pattern);
}

void append_nfc(std::string_view text, std::string& out) {
    utf8proc_uint8_t* made = nullptr;
    const utf8proc_ssize_t size = utf8proc_map(
        reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
        &made, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(made, std::free);
    check(size >= 0, "valid UTF-8 has a form NFC");
    out.append(reinterpret_cast<const char*>(made), static_cast<std::size_t>(size));
}

// Characters that `tokenizers` does not know begin and end what is normalized together.
std::string nfc(std::string_view text) {
    std::string result;
    while (!text.empty()) {
        std::size_t known = 0;
        Utf8Character character{};
        while (known < text.size()) {
            character = first_character(text.substr(known));
            if (!is_known_to_nfc(character.code)) break;
            known += character.length;
        }
        append_nfc(text.substr(0, known), result);
        const std::size_t end = known < text.size() ? known + character.length : known;
        result += text.substr(known, end - known);
        text.remove_prefix(end);
    }
    return result;
}

bool is_white_space(std::string_view character) {
    static const WordPattern pattern(R"(\s)");
    return pattern.match(character, 0) > 0;
}

// The white space at the beginning of a text, in bytes.
std::size_t white_space_before(std::string_view text) {
    std::size_t end = 0;
    while (end < text.size()) {
        const std::size_t length = first_character(text.substr(end)).length;
        if (!is_white_space(text.substr(end, length))) break;
        end += length;
    }
    return end;
}

// The white space at the end of a text, in bytes.
std::size_t white_space_behind(std::string_view text) {
    std::size_t begin = text.size();
    while (begin > 0) {
        std::size_t place = begin - 1;
        while (place > 0 && (static_cast<unsigned char>(text[place]) & 0xc0U) == 0x80) --place;
        if (!is_white_space(text.substr(place, begin - place))) break;
        begin = place;
    }
    return text.size() - begin;
}

// One part of a word during merging.
struct Part {
    std::int32_t id;             // -1 once its left neighbour has absorbed it
    std::int32_t rank;           // of the merge of this part and the next one; -1 if there is none
    std::int32_t merged;         // the token that this merge makes
    std::uint32_t next, before;  // indices of parts; for the last part, `next` is their number
};

}  // namespace

Tokenizer::Tokenizer(TokenizerParts parts) : parts_(std::move(parts)) {
    check(parts_.tokens.size() < std::numeric_limits<std::int32_t>::max(), "ids are int32");
    for (std::size_t id = 0; id < parts_.tokens.size(); ++id) {
        const std::optional<std::string>& token = parts_.tokens[id];
        bytes_.push_back(token.value_or(""));
        if (token) ids_.emplace(*token, static_cast<std::int32_t>(id));
    }
    byte_ids_.fill(-1);
    for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
        const auto found = ids_.find(std::string(1, static_cast<char>(byte)));
        if (found != ids_.end()) byte_ids_[byte] = found->second;
    }
    for (std::size_t rank = 0; rank < parts_.merges.size(); ++rank) {
        const auto [left, right, merged] = parts_.merges[rank];
        merges_[pair_of(left, right)] = {static_cast<std::int32_t>(rank), merged};
    }
    for (const AddedToken& token : parts_.added) {
        const auto id = static_cast<std::size_t>(token.id);
        if (id >= bytes_.size()) bytes_.resize(id + 1);
        bytes_[id] = token.text;
    }
    for (std::size_t i = 0; i < parts_.added.size(); ++i) {
        const AddedToken& token = parts_.added[i];
        const auto first = static_cast<unsigned char>(token.text.at(0));
        (token.is_normalized ? normalized_ : plain_)[first].push_back(i);
    }
    for (const WordRule& rule : parts_.words)
        words_.push_back(naming_option(fmt::format("the pattern '{}'", one_line(rule.text)),
                                       [&] { return compiled(rule); }));
}

Tokenizer Tokenizer::of_bytes() {
    TokenizerParts parts;
    for (int byte = 0; byte < byte_vocabulary; ++byte)
        parts.tokens.emplace_back(std::string(1, static_cast<char>(byte)));
    Tokenizer tokenizer(std::move(parts));
    tokenizer.is_bytes_ = true;
    return tokenizer;
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view text) const {
    for (const AddedToken& token : parts_.added)
        if (token.text == text) return token.id;
    const auto found = ids_.find(std::string(text));
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

std::uint64_t Tokenizer::checksum() const {
    if (is_bytes_) return 0;
    std::vector<const AddedToken*> added(bytes_.size());
    for (const AddedToken& token : parts_.added) added[static_cast<std::size_t>(token.id)] = &token;
    std::string all = "tokens\n";
    for (std::size_t id = 0; id < bytes_.size(); ++id) {
        const AddedToken* const token = added[id];
        if (!token && (id >= parts_.tokens.size() || !parts_.tokens[id])) continue;
        std::string kind = !token ? "t" : token->is_special ? "s" : "a";
        if (token && token->strips_left) kind += 'l';
        if (token && token->strips_right) kind += 'r';
        if (token && token->is_normalized && parts_.is_nfc) kind += 'n';
        all += fmt::format("{} {} {} ", id, kind, bytes_[id].size()) + bytes_[id] + "\n";
    }
    all += "merges\n";
    for (const auto& [left, right, merged] : parts_.merges) all += fmt::format("{} {}\n", left, right);
    if (parts_.ignores_merges) all += "ignore_merges\n";
    all += "words\n";
    if (parts_.is_nfc) all += "nfc\n";
    for (const WordRule& rule : parts_.words) {
        if (rule.kind == WordRule::Kind::digits) {
            all += fmt::format("digits {:d}\n", rule.is_individual);
        } else {
            all += fmt::format("{} {} {}\n", rule.kind == WordRule::Kind::text ? "string" : "split",
                               rule.text.size(), rule.text);
        }
    }
    for (const std::int32_t token : parts_.beginning) all += fmt::format("begin {}\n", token);
    return XXH3_64bits(all.data(), all.size());
}

Tokenizer::Merged Tokenizer::merged(std::int32_t left, std::int32_t right) const {
    const auto found = merges_.find(pair_of(left, right));
    return found == merges_.end() ? Merged() : found->second;
}

// Repeatedly merges the two neighbours whose merge comes first, the leftmost of equal ones. The possible merges wait in
// a heap, so that a word of n bytes takes O(n log n).
void Tokenizer::encode_word(std::string_view word, std::vector<std::int32_t>& out) const {
    if (parts_.ignores_merges) {
        if (const auto found = ids_.find(std::string(word)); found != ids_.end()) {
            out.push_back(found->second);
            return;
        }
    }
    check(word.size() < std::numeric_limits<std::uint32_t>::max(), "a word has less than 4 GiB");
    std::vector<Part> parts;
    for (const char byte : word) {
        const std::int32_t id = byte_ids_[static_cast<unsigned char>(byte)];
        const auto place = static_cast<std::uint32_t>(parts.size());
        if (id >= 0)
            parts.push_back({.id = id, .rank = -1, .merged = -1, .next = place + 1, .before = place - 1});
    }
    const auto size = static_cast<std::uint32_t>(parts.size());
    std::vector<std::pair<std::int32_t, std::uint32_t>>
        heap;  // the merge's rank, and the index of its left part
    const auto consider = [&](std::uint32_t place) {
        Part& part = parts[place];
        const Merged one = part.next == size ? Merged() : merged(part.id, parts[part.next].id);
        part.rank = one.rank;
        part.merged = one.id;
        if (part.rank < 0) return;
        heap.emplace_back(part.rank, place);
        std::ranges::push_heap(heap, std::greater<>());
    };
    for (std::uint32_t i = 0; i < size; ++i) consider(i);
    while (!heap.empty()) {
        std::ranges::pop_heap(heap, std::greater<>());
        const auto [rank, place] = heap.back();
        heap.pop_back();
        Part& part = parts[place];
        // A part that has changed since is in the heap again, with its new merge.
        if (part.id < 0 || part.rank != rank) continue;
        Part& taken = parts[part.next];
        part.id = part.merged;
        part.next = taken.next;
        taken.id = -1;
        if (part.next < size) parts[part.next].before = place;
        consider(place);
        if (place > 0) consider(part.before);
    }
    for (std::uint32_t i = 0; i < size; i = parts[i].next) out.push_back(parts[i].id);
}

// Splits by the rules from `rule` on.
void Tokenizer::encode_segment(std::string_view text, std::size_t rule,
                               std::vector<std::int32_t>& out) const {
    if (rule == words_.size()) return encode_word(text, out);
    std::size_t begin = 0;  // of what no match has taken
    for (std::size_t place = 0; place < text.size();) {
        const std::size_t length = words_[rule].match(text, place);
        if (length == 0) {
            place += first_character(text.substr(place)).length;
            continue;
        }
        if (place > begin) encode_segment(text.substr(begin, place - begin), rule + 1, out);
        encode_segment(text.substr(place, length), rule + 1, out);
        begin = place += length;
    }
    if (begin < text.size()) encode_segment(text.substr(begin), rule + 1, out);
}

// Appends the added tokens in a text, and calls `other` with the place and the size of each piece between them. Of
// tokens that begin at the same place, the longest counts.
template <class Other>
void Tokenizer::split_at_tokens(std::string_view text, const std::vector<bool>& ordinary,
                                const ByFirstByte& added, std::vector<std::int32_t>& out,
                                Other&& other) const {
    std::size_t begin = 0;  // of the piece
    for (std::size_t place = 0; place < text.size();) {
        const AddedToken* longest = nullptr;
        for (const std::size_t index : added[static_cast<unsigned char>(text[place])]) {
            const AddedToken& token = parts_.added[index];
            const bool is_longer = !longest || token.text.size() > longest->text.size();
            if (is_longer && text.substr(place).starts_with(token.text)) longest = &token;
        }
        if (!longest) {
            ++place;
            continue;
        }
        std::size_t first = std::max(place, begin), end = place + longest->text.size();
        const auto bytes = ordinary.begin() + static_cast<std::ptrdiff_t>(place);
        const bool is_text =
            std::find(bytes, bytes + std::ssize(longest->text), true) != bytes + std::ssize(longest->text);
        place = end;
        if (longest->is_special && is_text) continue;
        if (longest->strips_left) first -= white_space_behind(text.substr(begin, first - begin));
        if (longest->strips_right) end += white_space_before(text.substr(end));
        if (first > begin) other(begin, first - begin);
        out.push_back(longest->id);
        begin = std::max(begin, end);
    }
    if (begin < text.size()) other(begin, text.size() - begin);
}

std::vector<std::int32_t> Tokenizer::encode(std::span<const TextPiece> pieces) const {
    std::vector<std::int32_t> tokens;
    std::string text;
    std::vector<bool> ordinary;
    for (const TextPiece& piece : pieces) {
        text += is_bytes_ || is_utf8(piece.text) ? piece.text : with_replacements(piece.text);
        ordinary.resize(text.size(), piece.is_ordinary);
    }
    if (is_bytes_) {
        for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
        return tokens;
    }
    split_at_tokens(text, ordinary, plain_, tokens, [&](std::size_t begin, std::size_t size) {
        std::string piece = text.substr(begin, size);
        const auto from = ordinary.begin() + static_cast<std::ptrdiff_t>(begin);
        std::vector<bool> of_piece(from, from + static_cast<std::ptrdiff_t>(size));
        if (parts_.is_nfc) {
            // Which bytes come from which is not known. A piece with ordinary text is ordinary as a whole.
            const bool is_ordinary = std::find(of_piece.begin(), of_piece.end(), true) != of_piece.end();
            piece = nfc(piece);
            of_piece.assign(piece.size(), is_ordinary);
        }
        split_at_tokens(piece, of_piece, normalized_, tokens, [&](std::size_t place, std::size_t length) {
            encode_segment(std::string_view(piece).substr(place, length), 0, tokens);
        });
    });
    return tokens;
}

std::string Tokenizer::decode(std::span<const std::int32_t> tokens) const {
    std::string bytes;
    for (const std::int32_t token : tokens) {
        if (token >= 0 && token < vocabulary()) bytes += bytes_[static_cast<std::size_t>(token)];
    }
    return bytes;
}

}  // namespace llmc
