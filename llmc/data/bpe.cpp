#include "llmc/data/bpe.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/utf8.h"
#include "llmc/data/words.h"

namespace llmc {
namespace {

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

// (The identity, which the standard library takes, would put all pairs with one right token next to each other.)
std::size_t BytePairEncoder::PairHash::operator()(std::uint64_t pair) const {
    const std::uint64_t product = pair * 0x9e3779b97f4a7c15U;
    return product ^ product >> 32;
}

BytePairEncoder::BytePairEncoder(std::vector<std::string> tokens) : tokens_(std::move(tokens)) {
    check(tokens_.size() < std::numeric_limits<std::int32_t>::max(), "ids are int32");
    ids_.reserve(tokens_.size());
    for (std::size_t id = 0; id < tokens_.size(); ++id)
        ids_.emplace(tokens_[id], static_cast<std::int32_t>(id));
    for (int byte = 0; byte < 256; ++byte)
        check(ids_.contains(std::string(1, static_cast<char>(byte))), "every byte is a token");

    // Two tokens are merged where what they make is one, whichever merge of the file made it first.
    for (std::size_t id = 0; id < tokens_.size(); ++id) {
        const std::string_view token = tokens_[id];
        for (std::size_t left = 1; left < token.size(); ++left) {
            const auto first = ids_.find(token.substr(0, left)), second = ids_.find(token.substr(left));
            if (first != ids_.end() && second != ids_.end())
                merges_.emplace(pair_of(first->second, second->second), static_cast<std::int32_t>(id));
        }
    }
}

std::int32_t BytePairEncoder::merged(std::int32_t left, std::int32_t right) const {
    const auto found = merges_.find(pair_of(left, right));
    return found == merges_.end() ? -1 : found->second;
}

// Again and again the two neighbours whose token has the lowest id, and of several such the leftmost, become one. The
// candidates wait in a heap, so that a word of any length takes n log n.
void BytePairEncoder::merge(std::string_view word, std::vector<std::int32_t>& out) const {
    check(word.size() <= std::numeric_limits<std::uint32_t>::max(), "a word has less than 4 GiB");
    struct Part {
        std::int32_t id;             // -1 once its left neighbour has taken it up
        std::int32_t merged;         // what it and the next part would be
        std::uint32_t next, before;  // places; the word's size after the last one
    };
    const auto size = static_cast<std::uint32_t>(word.size());
    std::vector<Part> parts(size);
    std::vector<std::pair<std::int32_t, std::uint32_t>> storage;
    storage.reserve(size);
    std::priority_queue candidates(std::greater<>(), std::move(storage));
    const auto consider = [&](std::uint32_t place) {
        Part& part = parts[place];
        part.merged = part.next == size ? -1 : merged(part.id, parts[part.next].id);
        if (part.merged >= 0) candidates.emplace(part.merged, place);
    };

    for (std::uint32_t i = 0; i < size; ++i)
        parts[i] = {.id = ids_.find(word.substr(i, 1))->second, .merged = -1, .next = i + 1, .before = i - 1};
    for (std::uint32_t i = 0; i < size; ++i) consider(i);
    while (!candidates.empty()) {
        const auto [id, place] = candidates.top();
        candidates.pop();
        Part& part = parts[place];
        // What has changed since is in the heap anew.
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
    std::string repaired;
    if (!is_utf8(text)) text = repaired = with_replacements(text);
    while (!text.empty()) {
        const std::string_view word = text.substr(0, first_word(text));
        const auto whole = ids_.find(word);
        if (whole != ids_.end()) {
            out.push_back(whole->second);
        } else {
            merge(word, out);
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

}  // namespace llmc
