// Where tokens come from: bytes of text, or shards of tokens in files. Files are mapped, not loaded: a source
// of any size takes no memory of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace llmc {

// Sequences of tokens ("shards"), each a piece of text of its own. Reading is const and may be done by
// several threads at once.
class TokenSource {
  public:
    virtual ~TokenSource() = default;

    virtual std::size_t shards() const = 0;
    virtual std::int64_t tokens(std::size_t shard) const = 0;
    std::int64_t tokens() const;  // of all shards

    // Tokens first ... first + out.size() - 1 of a shard. UserError for a token that is not below the
    // vocabulary's size: it names the file, the position in it, the token and the vocabulary.
    virtual void read(std::size_t shard, std::int64_t first, std::span<std::int32_t> out) const = 0;
};

class MappedFile;

// Text, a byte a token, one shard. `name` is for messages; `owner` keeps the bytes alive; `position` is that
// of the first byte in the whole text, if these are a part of it.
struct Text {
    std::string name;
    std::shared_ptr<const void> owner;
    std::span<const std::uint8_t> bytes;
    std::int64_t position = 0;
    std::shared_ptr<const MappedFile> file = nullptr;  // whose bytes these are, if they are a file's
};
std::unique_ptr<TokenSource> make_text_source(Text text, std::int64_t vocabulary);

// The field's files of tokens: a header of 256 int32, which begins with (20240520, 1, tokens) where uint16
// tokens follow and with (20240801, 7, tokens) where uint32 tokens do; little-endian. A shard a file, in the
// given order; the two kinds may be mixed. UserError for a file that is not of this form or does not hold
// what its header says; `option` ("--train-data") begins its line.
std::unique_ptr<TokenSource> open_token_shards(const std::vector<std::string>& paths, std::int64_t vocabulary,
                                               const std::string& option);

}  // namespace llmc
