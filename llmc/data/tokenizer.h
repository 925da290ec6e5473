// Converts between text and tokens. A vocabulary of 256 means bytes; a byte-pair encoding (bpe.h) may be
// given for another one. For any other vocabulary only the ids are known, and they are written as decimal
// numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

class BytePairEncoder;

inline constexpr std::int64_t byte_vocabulary = 256;

// The tokens of the prompt that a generated text begins with, at least one. For bytes and with `bpe`, the
// prompt is text in which \n, \t and \\ stand for a new line, a tab and a backslash. With `bpe`,
// "<|endoftext|>" stands for that token. Otherwise the prompt is ids separated by spaces. An empty prompt
// gives `begin`; without it a new line, or GPT-2's end of text (token 0 if the vocabulary is smaller).
// UserError for a prompt that the vocabulary does not allow.
std::vector<std::int32_t> encode_prompt(std::string_view prompt, std::int64_t vocabulary,
                                        const BytePairEncoder* bpe = nullptr,
                                        std::optional<std::int32_t> begin = {});

// Whether text can be encoded in a vocabulary, and the tokens of a text without escapes, in which
// "<|endoftext|>" is ordinary text.
bool encodes_text(std::int64_t vocabulary, const BytePairEncoder* bpe);
std::vector<std::int32_t> encode_text(std::string_view text, const BytePairEncoder* bpe);

// Converts tokens, as they arrive, to printable text; to decimal ids if the vocabulary has no text. Bytes
// that are not UTF-8 become U+FFFD (core/text.h). So do control characters, which could disturb a terminal.
class TextStream {
  public:
    explicit TextStream(std::int64_t vocabulary, const BytePairEncoder* bpe = nullptr)
        : vocabulary_(vocabulary), bpe_(bpe) {}

    // The characters that this token completes. A character is returned once all its bytes are there.
    std::string add(std::int32_t token);
    // The rest at the end: an incomplete character, as U+FFFD.
    std::string rest();

  private:
    std::int64_t vocabulary_;
    const BytePairEncoder* bpe_;
    bool has_begun_ = false;
    std::string pending_;  // the bytes of an incomplete character
};

// All the tokens as text.
std::string decode(std::span<const std::int32_t> tokens, std::int64_t vocabulary,
                   const BytePairEncoder* bpe = nullptr);

}  // namespace llmc
