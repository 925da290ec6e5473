#include "llmc/data/prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/tokenizer.h"
#include "llmc/data/tokenizer_files.h"

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
                word, vocabulary, advice_for_tokenizer(vocabulary), vocabulary - 1);
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
                                        const Tokenizer* tokenizer, std::optional<std::int32_t> begin) {
    if (!tokenizer) {
        std::vector<std::int32_t> tokens = parse_ids(prompt, vocabulary);
        if (tokens.empty())
            tokens.push_back(begin.value_or(vocabulary > gpt2_end_of_text ? gpt2_end_of_text : 0));
        return tokens;
    }
    std::vector<std::int32_t> tokens = tokenizer->encode(unescaped(prompt));
    const std::vector<std::int32_t>& beginning = tokenizer->beginning();
    const bool begins =
        tokens.size() >= beginning.size() && std::equal(beginning.begin(), beginning.end(), tokens.begin());
    if (!begins) tokens.insert(tokens.begin(), beginning.begin(), beginning.end());
    if (!tokens.empty()) return tokens;
    if (begin) return {*begin};
    if (const auto end = tokenizer->id_of(end_of_text_name)) return {*end};
    return tokenizer->encode("\n");
}

std::string TextStream::add(std::int32_t token) {
    const bool is_first = !std::exchange(has_begun_, true);
    if (!tokenizer_) return fmt::format("{}{}", is_first ? "" : " ", token);
    pending_ += tokenizer_->decode({&token, 1});
    return take_text(pending_, false);
}

std::string TextStream::rest() { return take_text(pending_, true); }

std::string printable(std::span<const std::int32_t> tokens, const Tokenizer* tokenizer) {
    TextStream stream(tokenizer);
    std::string text;
    for (const std::int32_t token : tokens) text += stream.add(token);
    return text + stream.rest();
}

}  // namespace llmc
