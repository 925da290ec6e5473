#include "llmc/data/bpe.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <limits>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/unicode_classes.h"

namespace llmc {
namespace {

std::size_t hash_of(std::string_view word) { return XXH3_64bits(word.data(), word.size()); }

std::size_t hash_of(std::int32_t left, std::int32_t right) {
    const std::uint64_t pair =
        std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
    const std::uint64_t product = pair * 0x9e3779b97f4a7c15U;  // 2^64 over the golden ratio
    return product ^ product >> 32;
}

// The entry for which `is_found` is true, or the free one where it would be. The table has 2^n entries.
template <class Table, class Free, class Found>
auto& find(Table& table, std::size_t hash, Free&& is_free, Found&& is_found) {
    const std::size_t mask = table.size() - 1;
    std::size_t place = hash & mask;
    while (!is_free(table[place]) && !is_found(table[place])) place = (place + 1) & mask;
    return table[place];
}

std::size_t table_size(std::size_t entries) { return std::bit_ceil(2 * entries + 2); }

}  // namespace

struct BytePairEncoder::Part {
    std::int32_t id;             // -1 once its left neighbour has absorbed it
    std::int32_t merged;         // the token of this part and the next one; -1 if there is none
    std::uint32_t next, before;  // indices of parts; for the last part, `next` is the word's size
};

struct BytePairEncoder::Scratch {
    std::vector<Part> parts;
    std::vector<std::pair<std::int32_t, std::uint32_t>>
        heap;  // the merged token, and the index of its left part
};

BytePairEncoder::BytePairEncoder(std::vector<std::string> tokens) : tokens_(std::move(tokens)) {
    check(tokens_.size() < std::numeric_limits<std::int32_t>::max(), "ids are int32");
    const auto id_entry = [this](std::string_view word) -> std::int32_t& {
        return find(
            ids_, hash_of(word), [](std::int32_t id) { return id < 0; },
            [&](std::int32_t id) { return tokens_[static_cast<std::size_t>(id)] == word; });
    };
    ids_.assign(table_size(tokens_.size()), -1);
    for (std::size_t id = 0; id < tokens_.size(); ++id) {
        std::int32_t& entry = id_entry(tokens_[id]);
        if (entry < 0) entry = static_cast<std::int32_t>(id);
    }
    for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
        const char name = static_cast<char>(byte);
        byte_ids_[byte] = id_of({&name, 1});
        check(byte_ids_[byte] >= 0, "every byte is a token");
    }

    // Two tokens are merged if their concatenation is a token, even if that token's line in the file has two
    // others.
    std::vector<Merge> merges;
    for (std::size_t id = 0; id < tokens_.size(); ++id) {
        const std::string_view token = tokens_[id];
        for (std::size_t length = 1; length < token.size(); ++length) {
            const std::int32_t left = id_of(token.substr(0, length));
            const std::int32_t right = left < 0 ? -1 : id_of(token.substr(length));
            if (right >= 0) merges.push_back({left, right, static_cast<std::int32_t>(id)});
        }
    }
    merges_.assign(table_size(merges.size()), {-1, -1, -1});
    for (const Merge& merge : merges) {
        find(
            merges_, hash_of(merge.left, merge.right), [](const Merge& entry) { return entry.merged < 0; },
            [](const Merge&) { return false; }) = merge;
    }
}

std::int32_t BytePairEncoder::id_of(std::string_view word) const {
    return find(
        ids_, hash_of(word), [](std::int32_t id) { return id < 0; },
        [&](std::int32_t id) { return tokens_[static_cast<std::size_t>(id)] == word; });
}

std::int32_t BytePairEncoder::merged(std::int32_t left, std::int32_t right) const {
    return find(
               merges_, hash_of(left, right), [](const Merge& entry) { return entry.merged < 0; },
               [&](const Merge& entry) { return entry.left == left && entry.right == right; })
        .merged;
}

// Repeatedly merges the two neighbours whose merged token has the lowest id, the leftmost of equal ones. The
// possible merges wait in a heap, so that a word of n bytes takes O(n log n).
void BytePairEncoder::merge(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const {
    check(word.size() < std::numeric_limits<std::uint32_t>::max(), "a word has less than 4 GiB");
    const auto size = static_cast<std::uint32_t>(word.size());
    auto& parts = scratch.parts;
    auto& heap = scratch.heap;
    const auto candidate = [&](std::uint32_t place) {
        Part& part = parts[place];
        part.merged = part.next == size ? -1 : merged(part.id, parts[part.next].id);
        return part.merged >= 0;
    };
    const auto consider = [&](std::uint32_t place) {
        if (!candidate(place)) return;
        heap.emplace_back(parts[place].merged, place);
        std::ranges::push_heap(heap, std::greater<>());
    };

    parts.clear();
    heap.clear();
    for (std::uint32_t i = 0; i < size; ++i) {
        const std::int32_t id = byte_ids_[static_cast<unsigned char>(word[i])];
        parts.push_back({.id = id, .merged = -1, .next = i + 1, .before = i - 1});
    }
    for (std::uint32_t i = 0; i < size; ++i) {
        if (candidate(i)) heap.emplace_back(parts[i].merged, i);
    }
    std::ranges::make_heap(heap, std::greater<>());
    while (!heap.empty()) {
        std::ranges::pop_heap(heap, std::greater<>());
        const auto [id, place] = heap.back();
        heap.pop_back();
        Part& part = parts[place];
        // A part that has changed since is in the heap again, with its new token.
        if (part.id < 0 || part.merged != id) continue;
        Part& taken = parts[part.next];
        part.id = id;
        part.next = taken.next;
        taken.id = -1;
        if (part.next < size) parts[part.next].before = place;
        consider(place);
        if (place > 0) consider(part.before);
    }
    for (std::uint32_t i = 0; i < size; i = parts[i].next) out.push_back(parts[i].id);
}

void BytePairEncoder::encode_ordinary(std::string_view text, std::vector<std::int32_t>& out) const {
    Scratch scratch;
    std::string repaired;
    if (!is_utf8(text)) text = repaired = with_replacements(text);
    while (!text.empty()) {
        const std::string_view word = text.substr(0, first_word(text));
        if (const std::int32_t whole = id_of(word); whole >= 0) {
            out.push_back(whole);
        } else {
            merge(word, scratch, out);
        }
        text.remove_prefix(word.size());
    }
}

std::vector<std::int32_t> BytePairEncoder::encode(std::string_view text) const {
    std::vector<std::int32_t> tokens;
    while (true) {
        const std::size_t end = text.find(end_of_text_name);
        encode_ordinary(text.substr(0, end), tokens);
        if (end == std::string_view::npos) return tokens;
        tokens.push_back(end_of_text());
        text.remove_prefix(end + end_of_text_name.size());
    }
}

std::string BytePairEncoder::decode(std::span<const std::int32_t> tokens) const {
    std::string bytes;
    for (const std::int32_t token : tokens) {
        check(token >= 0 && token < vocabulary(), "a token is in the vocabulary");
        bytes += token == end_of_text() ? end_of_text_name : tokens_[static_cast<std::size_t>(token)];
    }
    return bytes;
}

namespace {

// The length of 's, 'll and the like at the beginning of the text, in bytes; 0 if there is none.
std::size_t contraction(std::string_view text) {
    if (text[0] != '\'') return 0;
    constexpr std::array<std::string_view, 7> endings = {"s", "t", "re", "ve", "m", "ll", "d"};
    for (const std::string_view ending : endings) {
        if (text.substr(1).starts_with(ending)) return 1 + ending.size();
    }
    return 0;
}

// The first position from `begin` on whose character is not of this class.
std::size_t end_of_run(std::string_view text, std::size_t begin, CharacterClass kind) {
    while (begin < text.size()) {
        const Utf8Character character = first_character(text.substr(begin));
        if (class_of(character.code) != kind) break;
        begin += character.length;
    }
    return begin;
}

// The length of the white space before the next word. If its last character is a space, that space
// belongs to the next word; any other last character becomes a word of its own.
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
