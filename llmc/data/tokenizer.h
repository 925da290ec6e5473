// Text to tokens and back: bytes, or a byte-level byte-pair encoding with the ids of PyPI's `tokenizers`.
// tokenizer_files.h reads one; prompt.h has what a run does with it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "llmc/data/word_pattern.h"

namespace llmc {

inline constexpr std::int64_t byte_vocabulary = 256;
inline constexpr std::int64_t gpt2_vocabulary = 50257;
inline constexpr std::string_view gpt2_words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A token that stands for itself wherever it is in a text, before the text is split into words.
struct AddedToken {
    std::int32_t id = 0;
    std::string text;
    bool is_special = false;                         // such as a mark of a conversation
    bool strips_left = false, strips_right = false;  // takes the white space beside it
    bool is_normalized = false;                      // is looked for in the normalized text
};

// A rule that splits text into words, which no token crosses. What it matches is a word, and so is what lies between.
struct WordRule {
    enum class Kind : std::uint8_t { pattern, text, digits } kind;
    std::string text;           // of `pattern` and `text`
    bool is_individual = true;  // of `digits`: each is a word
};

// What a tokenizer's file says.
struct TokenizerParts {
    std::vector<std::optional<std::string>>
        tokens;  // the bytes of each id; none where there is no ordinary token
    std::vector<AddedToken> added;
    struct Merge {
        std::int32_t left, right, merged;
    };
    std::vector<Merge> merges;            // the first in a word comes first
    bool ignores_merges = false;          // a word that is a token needs no merges
    bool is_nfc = false;                  // text is normalized to Unicode's form NFC
    std::vector<WordRule> words;          // each splits the words of those before it
    std::vector<std::int32_t> beginning;  // tokens before every text
};

// A part of a text. In an ordinary one, special tokens are text.
struct TextPiece {
    std::string text;
    bool is_ordinary = false;
};

class Tokenizer {
  public:
    // UserError if a rule for words is not supported.
    explicit Tokenizer(TokenizerParts parts);
    // Each byte is a token.
    static Tokenizer of_bytes();

    // One more than the largest id.
    std::int64_t vocabulary() const { return static_cast<std::int64_t>(bytes_.size()); }
    // The tokens that the tokenizer puts before every text.
    const std::vector<std::int32_t>& beginning() const { return parts_.beginning; }
    // The id of a token with this text, an added one if there is one; none if there is no such token.
    std::optional<std::int32_t> id_of(std::string_view text) const;
    // A number that says what the tokenizer computes, whatever its file looks like (docs/interface.md); 0 for bytes.
    std::uint64_t checksum() const;

    // The tokens of the joined text of the pieces, without those of the beginning. Bytes that are not UTF-8 count as
    // U+FFFD (core/text.h), and those without a token are dropped. Any number of threads may encode at once.
    std::vector<std::int32_t> encode(std::span<const TextPiece> pieces) const;
    std::vector<std::int32_t> encode(std::string_view text) const { return encode(text, false); }
    // The same, but special tokens in the text are ordinary text.
    std::vector<std::int32_t> encode_ordinary(std::string_view text) const { return encode(text, true); }

    // The bytes that tokens stand for; none for an id without a token.
    std::string decode(std::span<const std::int32_t> tokens) const;

  private:
    std::vector<std::int32_t> encode(std::string_view text, bool is_ordinary) const {
        const TextPiece piece{std::string(text), is_ordinary};
        return encode(std::span(&piece, 1));
    }
    void encode_segment(std::string_view text, std::size_t rule, std::vector<std::int32_t>& out) const;
    void encode_word(std::string_view word, std::vector<std::int32_t>& out) const;

    struct Merged {
        std::int32_t rank = -1, id = -1;  // negative if there is no such merge
    };
    Merged merged(std::int32_t left, std::int32_t right) const;

    // Added tokens by the first byte of their texts, as indices.
    using ByFirstByte = std::array<std::vector<std::size_t>, 256>;
    // `ordinary` says of each byte whether no special token may have it.
    template <class Other>
    void split_at_tokens(std::string_view text, const std::vector<bool>& ordinary, const ByFirstByte& added,
                         std::vector<std::int32_t>& out, Other&& other) const;

    bool is_bytes_ = false;
    TokenizerParts parts_;
    ByFirstByte plain_, normalized_;
    std::vector<std::string> bytes_;            // of each id
    std::array<std::int32_t, 256> byte_ids_{};  // -1 for a byte without a token
    std::unordered_map<std::string, std::int32_t> ids_;
    std::unordered_map<std::uint64_t, Merged> merges_;
    std::vector<WordPattern> words_;
};

}  // namespace llmc
