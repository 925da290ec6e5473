#include "llmc/data/tokenizer.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

namespace {

constexpr std::int64_t byte_vocabulary = 256;
constexpr std::int32_t gpt2_end_of_text = 50256;

std::vector<std::int32_t> encode_bytes(std::string_view prompt) {
    std::vector<std::int32_t> tokens;
    for (std::size_t i = 0; i < prompt.size(); ++i) {
        char c = prompt[i];
        if (c == '\\' && i + 1 < prompt.size()) {
            const char next = prompt[i + 1];
            if (next == 'n' || next == 't' || next == '\\') {
                c = next == 'n' ? '\n' : next == 't' ? '\t' : '\\';
                ++i;
            }
        }
        tokens.push_back(static_cast<unsigned char>(c));
    }
    return tokens;
}

std::vector<std::int32_t> parse_ids(std::string_view prompt, std::int64_t vocabulary) {
    std::vector<std::int32_t> tokens;
    while (true) {
        const std::size_t begin = prompt.find_first_not_of(' ');
        if (begin == std::string_view::npos) return tokens;
        prompt.remove_prefix(begin);
        const std::string_view word = prompt.substr(0, prompt.find(' '));
        std::int32_t token = -1;
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), token);
        if (error != std::errc() || end != word.data() + word.size() || token < 0 || token >= vocabulary) {
            user_error(
                "--prompt: {} is no token of a vocabulary of {}; give ids from 0 to {}, separated by spaces",
                word, vocabulary, vocabulary - 1);
        }
        tokens.push_back(token);
        prompt.remove_prefix(word.size());
    }
}

// The length of the UTF-8 sequence that begins the text, 0 if none does (RFC 3629).
std::size_t utf8_length(std::string_view text) {
    const auto byte = [&](std::size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
    };
    const auto follows = [&](std::size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
        return byte(i) >= low && byte(i) <= high;
    };
    const unsigned first = byte(0);
    if (first < 0x80) return 1;
    if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
    if (first >= 0xe0 && first <= 0xef) {
        const unsigned low = first == 0xe0 ? 0xa0 : 0x80, high = first == 0xed ? 0x9f : 0xbf;
        return follows(1, low, high) && follows(2) ? 3 : 0;
    }
    if (first >= 0xf0 && first <= 0xf4) {
        const unsigned low = first == 0xf0 ? 0x90 : 0x80, high = first == 0xf4 ? 0x8f : 0xbf;
        return follows(1, low, high) && follows(2) && follows(3) ? 4 : 0;
    }
    return 0;
}

// C0 but for line feed and tab, DEL, and C1 (U+0080 to U+009F), which terminals obey as well.
bool is_control(std::string_view character) {
    const auto first = static_cast<unsigned char>(character[0]);
    if (character.size() == 1) return (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f;
    return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

// Whether the text begins a UTF-8 sequence, of which bytes are missing: whether there are bytes that complete it. (The
// second byte has bounds of its own, of which one of the two is within, and the others have common ones.)
bool lacks_bytes(std::string_view text) {
    for (std::size_t length = text.size() + 1; length <= 4; ++length) {
        for (const char filler : {'\x80', '\xa0'}) {
            std::string whole(text);
            whole.resize(length, filler);
            if (utf8_length(whole) == length) return true;
        }
    }
    return false;
}

// Takes whole characters from the bytes' beginning, as they are printed; with `ends`, whatever is there.
std::string take_text(std::string& bytes, bool ends) {
    constexpr std::string_view replacement = "\xef\xbf\xbd";  // U+FFFD
    std::string text;
    std::string_view rest = bytes;
    while (!rest.empty()) {
        const std::size_t length = utf8_length(rest);
        if (length == 0 && !ends && lacks_bytes(rest)) break;
        const bool printable = length > 0 && !is_control(rest.substr(0, length));
        text += printable ? rest.substr(0, length) : replacement;
        rest.remove_prefix(std::max<std::size_t>(length, 1));
    }
    bytes.erase(0, bytes.size() - rest.size());
    return text;
}

}  // namespace

std::vector<std::int32_t> encode_prompt(std::string_view prompt, std::int64_t vocabulary) {
    std::vector<std::int32_t> tokens =
        vocabulary == byte_vocabulary ? encode_bytes(prompt) : parse_ids(prompt, vocabulary);
    if (tokens.empty()) {
        if (vocabulary == byte_vocabulary) return {'\n'};
        return {vocabulary > gpt2_end_of_text ? gpt2_end_of_text : 0};
    }
    return tokens;
}

std::string TextStream::add(std::int32_t token) {
    const bool is_first = !std::exchange(has_begun_, true);
    if (vocabulary_ != byte_vocabulary) return (is_first ? "" : " ") + std::to_string(token);
    pending_ += static_cast<char>(token);
    return take_text(pending_, false);
}

std::string TextStream::rest() { return take_text(pending_, true); }

std::string decode(std::span<const std::int32_t> tokens, std::int64_t vocabulary) {
    TextStream stream(vocabulary);
    std::string text;
    for (const std::int32_t token : tokens) text += stream.add(token);
    return text + stream.rest();
}

}  // namespace llmc
