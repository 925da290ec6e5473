// Sources of tokens: bytes of text, or token shards in files. Files are mapped, not loaded, so a source of
// any size takes no memory of its own.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmc {

// A read-only mapping for the object's life. The file itself is closed, because a dataset may have more files
// than a process may have open.
class MappedFile {
  public:
    // UserError if the file does not exist, cannot be read, is not a regular file or is empty. The message
    // begins with `option` ("--train-data").
    MappedFile(const std::string& path, const std::string& option);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::uint8_t> bytes() const { return {data_, size_}; }

    // UserError if the file has become shorter: reading bytes that are gone would kill the process.
    void require_whole() const;

  private:
    void map(int file, const std::string& option);

    std::string path_;
    dev_t device_ = 0;
    ino_t inode_ = 0;
    const std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
};

// A conversation in a token shard: consecutive tokens that make a sample of their own, of which only some are targets.
struct Row {
    std::size_t shard;
    std::int64_t first, tokens;  // the index of its first token, and their number
    std::int64_t targets;        // those that the loss counts
};

// Sequences of tokens, called token shards, each a separate text. (Not the shards of a rank.) Reading is
// const, and several threads may read at once.
class TokenSource {
  public:
    virtual ~TokenSource() = default;

    virtual std::size_t shards() const = 0;
    virtual std::int64_t tokens(std::size_t shard) const = 0;
    std::int64_t tokens() const;  // in all shards
    virtual std::int64_t shards_of_16_bits() const { return 0; }
    // The checksum of the tokenizer that made a shard (tokenizer.h); 0 if it does not say.
    virtual std::uint64_t tokenizer_of(std::size_t /*shard*/) const { return 0; }

    // The conversations that the shards are divided into, in order; none if they are plain text.
    virtual std::span<const Row> rows() const { return {}; }

    // Reads tokens first ... first + out.size() - 1 of a shard. UserError for a token outside the vocabulary:
    // it names the file, the position in it, the token and the vocabulary.
    virtual void read(std::size_t shard, std::int64_t first, std::span<std::int32_t> out) const = 0;
    // Reads them as targets: those that the loss does not count are ignored_target.
    virtual void read_targets(std::size_t shard, std::int64_t first, std::span<std::int32_t> out) const {
        read(shard, first, out);
    }
};

// A text of one token per byte, which is one shard. `name` is for messages; `owner` keeps the bytes alive.
// `position` is the position of the first byte in the whole text, if these bytes are part of one.
struct Text {
    std::string name;
    std::shared_ptr<const void> owner;
    std::span<const std::uint8_t> bytes;
    std::int64_t position = 0;
    std::shared_ptr<const MappedFile> file = nullptr;  // the file that holds these bytes, if any
    std::span<const std::uint8_t> whole{};             // the whole text, if these bytes are part of one
};
std::unique_ptr<TokenSource> make_text_source(Text text, std::int64_t vocabulary);

// The bits of a token, 16 or 32, if a file with these bytes begins as a token shard does.
std::optional<int> bits_of_tokens(std::span<const std::uint8_t> bytes);

// Opens token shards: a header of 256 int32, then tokens, all little-endian. The header begins with
// (20240520, 1, tokens) for uint16 tokens and with (20240801, 7, tokens) for uint32 tokens; the lower and the upper
// half of the tokenizer's checksum follow, or zeros. Each file is a shard, in the given order; both kinds may be
// mixed. Shards of conversations begin with (20240801, 8, tokens). Behind the checksum they have the number of rows;
// bit 31 of a token says that the loss counts it, and bit 30 that a row begins with it. UserError for a file that
// does not have this form or does not match its header; the message begins with `option` ("--train-data").
std::unique_ptr<TokenSource> open_token_shards(const std::vector<std::string>& paths, std::int64_t vocabulary,
                                               const std::string& option);

}  // namespace llmc
