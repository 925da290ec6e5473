// GPT-2's byte-pair encoding: text to tokens and back, with the ids of tiktoken's "gpt2". bpe_files.h reads
// its two files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

inline constexpr std::int64_t gpt2_vocabulary = 50257;
inline constexpr std::string_view end_of_text_name = "<|endoftext|>";

// A token is a sequence of bytes. Its id gives the order of merging: first the 256 single bytes, in any
// order, then the result of each merge. The last id is the end of text, which stands for no bytes.
class BytePairEncoder {
  public:
    // `tokens`: the bytes of every token except the end of text, in the order of the ids. ProgrammingError if
    // a single byte is missing.
    explicit BytePairEncoder(std::vector<std::string> tokens);
    BytePairEncoder(BytePairEncoder&&) = default;
    BytePairEncoder& operator=(BytePairEncoder&&) = default;

    std::int64_t vocabulary() const { return std::ssize(tokens_) + 1; }
    std::int32_t end_of_text() const { return static_cast<std::int32_t>(tokens_.size()); }

    // Appends the tokens of a text, at most one per byte. The end of text is never among them. Bytes that are
    // not UTF-8 are encoded as U+FFFD (core/text.h). Any number of threads may encode at once.
    void encode_ordinary(std::string_view text, std::vector<std::int32_t>& out) const;

    // The same, but "<|endoftext|>" becomes the end-of-text token.
    std::vector<std::int32_t> encode(std::string_view text) const;

    // The bytes that tokens stand for, "<|endoftext|>" for the end of text. ProgrammingError if an id is not
    // a token.
    std::string decode(std::span<const std::int32_t> tokens) const;

  private:
    // The id of a word that is a token, and the token to which two adjacent tokens are merged; -1 if there is
    // none.
    std::int32_t id_of(std::string_view word) const;
    std::int32_t merged(std::int32_t left, std::int32_t right) const;

    // One part of a word during merging.
    struct Part;
    struct Scratch;
    void merge(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const;

    struct Merge {
        std::int32_t left, right, merged;  // -1 in a free entry
    };

    std::vector<std::string> tokens_;
    std::array<std::int32_t, 256> byte_ids_{};
    // Open-addressing tables, at most half full, of ids and of merges.
    std::vector<std::int32_t> ids_;
    std::vector<Merge> merges_;
};

// GPT-2's split of text into words, which no token crosses:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Returns the number of bytes of the first word of a text, which must be valid UTF-8 and not empty.
std::size_t first_word(std::string_view text);

}  // namespace llmc
