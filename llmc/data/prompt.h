// The prompt that a generated text begins with, and the text that comes out. Without a tokenizer only the ids are
// known; they are written as decimal numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

class Tokenizer;

// The tokens of a prompt, at least one. With a tokenizer the prompt is text, in which \n, \t and \\ stand for a new
// line, a tab and a backslash, and special tokens for themselves; the tokens that the tokenizer puts before every text
// come first, once. Otherwise the prompt is ids separated by spaces. An empty prompt gives these tokens, or `begin`, or
// the end of text, or a new line; without a tokenizer `begin`, or GPT-2's end of text (token 0 if the vocabulary is
// smaller). UserError for a prompt that the vocabulary does not allow.
std::vector<std::int32_t> encode_prompt(std::string_view prompt, std::int64_t vocabulary,
                                        const Tokenizer* tokenizer = nullptr,
                                        std::optional<std::int32_t> begin = {});

// Converts tokens, as they arrive, to printable text; to decimal ids without a tokenizer. Bytes that are not UTF-8
// become U+FFFD (core/text.h). So do control characters, which could disturb a terminal.
class TextStream {
  public:
    explicit TextStream(const Tokenizer* tokenizer = nullptr) : tokenizer_(tokenizer) {}

    // The characters that this token completes. A character is returned once all its bytes are there.
    std::string add(std::int32_t token);
    // The rest at the end: an incomplete character, as U+FFFD.
    std::string rest();

  private:
    const Tokenizer* tokenizer_;
    bool has_begun_ = false;
    std::string pending_;  // the bytes of an incomplete character
};

// All the tokens as text.
std::string printable(std::span<const std::int32_t> tokens, const Tokenizer* tokenizer);

}  // namespace llmc
