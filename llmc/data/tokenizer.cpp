#include "llmc/data/tokenizer.h"

#include <fmt/format.h>

#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/bpe.h"
#include "llmc/data/bpe_files.h"

namespace llmc {

namespace {

constexpr auto gpt2_end_of_text = static_cast<std::int32_t>(gpt2_vocabulary - 1);

// The text of a prompt, with its escapes replaced.
std::string unescaped(std::string_view prompt) {
    std::string text;
    for (std::size_t i = 0; i < prompt.size(); ++i) {
        char c = prompt[i];
        if (c == '\\' && i + 1 < prompt.size()) {
            const char next = prompt[i + 1];
            if (next == 'n' || next == 't' || next == '\\') {
                c = next == 'n' ? '\n' : next == 't' ? '\t' : '\\';
                ++i;
            }
        }
        text += c;
    }
    return text;
}

std::vector<std::int32_t> encode_bytes(std::string_view text) {
    std::vector<std::int32_t> tokens;
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
}

std::vector<std::int32_t> parse_ids(std::string_view prompt, std::int64_t vocabulary) {
    std::vector<std::int32_t> tokens;
    while (true) {
        const std::size_t begin = prompt.find_first_not_of(' ');
        if (begin == std::string_view::npos) return tokens;
        prompt.remove_prefix(begin);
        const std::string_view word = prompt.substr(0, prompt.find(' '));
        const auto token = whole_number<std::int32_t>(word);
        if (!token || *token < 0 || *token >= vocabulary) {
            user_error(
                "--prompt: {} is not a token of a vocabulary of {}; for text, {}; or give ids from 0 to {}, "
                "separated by spaces",
                word, vocabulary, advice_for_bpe(vocabulary), vocabulary - 1);
        }
        tokens.push_back(*token);
        prompt.remove_prefix(word.size());
    }
}

// C0 except line feed and tab; DEL; and C1 (U+0080 to U+009F), which terminals obey as well.
bool is_control(std::string_view character) {
    const auto first = static_cast<unsigned char>(character[0]);
    if (character.size() == 1) return (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f;
    return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

// Takes whole characters from the beginning of `bytes`, as they are printed. With `ends`, takes everything.
std::string take_text(std::string& bytes, bool ends) {
    std::string text;
    std::string_view left = bytes;
    while (!left.empty()) {
        const Utf8Character character = first_character(left);
        if (character.is_cut_off && !ends) break;
        const std::string_view own = left.substr(0, character.length);
        text += character.is_valid && !is_control(own) ? own : replacement_bytes;
        left.remove_prefix(character.length);
    }
    bytes.erase(0, bytes.size() - left.size());
    return text;
}

}  // namespace

std::vector<std::int32_t> encode_prompt(std::string_view prompt, std::int64_t vocabulary,
                                        const BytePairEncoder* bpe, std::optional<std::int32_t> begin) {
    std::vector<std::int32_t> tokens = bpe                             ? bpe->encode(unescaped(prompt))
                                       : vocabulary == byte_vocabulary ? encode_bytes(unescaped(prompt))
                                                                       : parse_ids(prompt, vocabulary);
    if (!tokens.empty()) return tokens;
    if (begin) return {*begin};
    if (bpe) return {bpe->end_of_text()};
    if (vocabulary == byte_vocabulary) return {'\n'};
    return {vocabulary > gpt2_end_of_text ? gpt2_end_of_text : 0};
}

bool encodes_text(std::int64_t vocabulary, const BytePairEncoder* bpe) {
    return bpe || vocabulary == byte_vocabulary;
}

std::vector<std::int32_t> encode_text(std::string_view text, const BytePairEncoder* bpe) {
    if (!bpe) return encode_bytes(text);
    std::vector<std::int32_t> tokens;
    bpe->encode_ordinary(text, tokens);
    return tokens;
}

std::string TextStream::add(std::int32_t token) {
    const bool is_first = !std::exchange(has_begun_, true);
    if (!encodes_text(vocabulary_, bpe_)) return fmt::format("{}{}", is_first ? "" : " ", token);
    pending_ += bpe_ ? bpe_->decode({&token, 1}) : std::string(1, static_cast<char>(token));
    return take_text(pending_, false);
}

std::string TextStream::rest() { return take_text(pending_, true); }

std::string decode(std::span<const std::int32_t> tokens, std::int64_t vocabulary,
                   const BytePairEncoder* bpe) {
    TextStream stream(vocabulary, bpe);
    std::string text;
    for (const std::int32_t token : tokens) text += stream.add(token);
    return text + stream.rest();
}

}  // namespace llmc
