// Between a person's text and tokens. A vocabulary of 256 is bytes; that of a byte-pair encoding (bpe.h) is given with it; of
// any other only the ids are known, and they are written as decimal numbers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

class BytePairEncoder;

inline constexpr std::int64_t byte_vocabulary = 256;

// The tokens a sample begins with, never none. For bytes and with `bpe` the prompt is text in which \n, \t and \\ stand
// for a new line, a tab and a backslash, and with `bpe` "<|endoftext|>" for that token; else ids separated by spaces.
// Without a prompt: a new line, or GPT-2's end of text (token 0 where the vocabulary is smaller). UserError for what is
// no prompt of the vocabulary.
std::vector<std::int32_t> encode_prompt(std::string_view prompt, std::int64_t vocabulary,
                                        const BytePairEncoder* bpe = nullptr);

// Whether text has tokens in a vocabulary; and those of a text as it is, in which "<|endoftext|>" is text too.
bool encodes_text(std::int64_t vocabulary, const BytePairEncoder* bpe);
std::vector<std::int32_t> encode_text(std::string_view text, const BytePairEncoder* bpe);

// Tokens as text to print, as they come, or their ids. Bytes that are not UTF-8 become U+FFFD (utf8.h), and control
// characters, which could upset a terminal, become U+FFFD too.
class TextStream {
  public:
    explicit TextStream(std::int64_t vocabulary, const BytePairEncoder* bpe = nullptr)
        : vocabulary_(vocabulary), bpe_(bpe) {}

    // What a further token makes whole: a character is given when all its bytes are there.
    std::string add(std::int32_t token);
    // What is left at the end: a character that was cut off, as U+FFFD.
    std::string rest();

  private:
    std::int64_t vocabulary_;
    const BytePairEncoder* bpe_;
    bool has_begun_ = false;
    std::string pending_;  // the bytes of a character that lacks some
};

// Tokens as text, all at once.
std::string decode(std::span<const std::int32_t> tokens, std::int64_t vocabulary,
                   const BytePairEncoder* bpe = nullptr);

}  // namespace llmc
