// GPT-2's byte-pair encoding: text to tokens and back, with the ids of tiktoken's "gpt2". Its two files are read by
// bpe_files.h; how text is split into words first is in words.h.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

inline constexpr std::int64_t gpt2_vocabulary = 50257;
inline constexpr std::string_view end_of_text_name = "<|endoftext|>";

// A token is a sequence of bytes, and its id says how early it is merged: the 256 single bytes come first, in any order,
// then what each merge makes; the last id is the end of text, which stands for no bytes.
class BytePairEncoder {
  public:
    // The bytes of every token but the end of text, by their ids. ProgrammingError where a byte is missing.
    explicit BytePairEncoder(std::vector<std::string> tokens);
    BytePairEncoder(BytePairEncoder&&) =
        default;  // (the map's keys are the tokens' own bytes, which stay where they are)
    BytePairEncoder& operator=(BytePairEncoder&&) = default;

    std::int64_t vocabulary() const { return std::ssize(tokens_) + 1; }
    std::int32_t end_of_text() const { return static_cast<std::int32_t>(tokens_.size()); }

    // Appends the tokens of a text, all of which is text: the end of text is never among them. There are at most as many as
    // bytes. What is not UTF-8 is encoded as U+FFFD (utf8.h). Any number of threads may encode at once.
    void encode_ordinary(std::string_view text, std::vector<std::int32_t>& out) const;

    // The same, but "<|endoftext|>" is the end of text.
    std::vector<std::int32_t> encode(std::string_view text) const;

    // The bytes that tokens stand for, "<|endoftext|>" for the end of text. ProgrammingError where an id is no token.
    std::string decode(std::span<const std::int32_t> tokens) const;

  private:
    // The id of a word that is a token, what two adjacent tokens are merged to; -1 where it is none, where they are not.
    std::int32_t id_of(std::string_view word) const;
    std::int32_t merged(std::int32_t left, std::int32_t right) const;

    // One part of a word while it is merged.
    struct Part;
    struct Scratch;
    void merge(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const;

    struct Merge {
        std::int32_t left, right, merged;  // -1 where there is none
    };

    std::vector<std::string> tokens_;
    std::array<std::int32_t, 256> byte_ids_{};
    // Tables with open addressing, of which at most half is taken: of ids, and of merges.
    std::vector<std::int32_t> ids_;
    std::vector<Merge> merges_;
};

}  // namespace llmc
