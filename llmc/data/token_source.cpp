#include "llmc/data/token_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/shard_names.h"
#include "llmc/device/ops.h"

namespace llmc {

namespace {

[[noreturn]] void cannot_read(const std::string& path, const std::string& option, int error) {
    user_error("{}: cannot read '{}': {}; give a readable file", option, path,
               std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(const std::string& path, const std::string& option) : path_(path) {
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0 && errno == ENOENT) {
        throw MissingFile(fmt::format(
            "{}: there is no file '{}'; give a text file, or token shards as 'PATTERN*.bin' in quotes",
            option, path));
    }
    if (file < 0) cannot_read(path, option, errno);
    try {
        map(file, option);
    } catch (...) {
        close(file);
        throw;
    }
    close(file);
}

void MappedFile::map(int file, const std::string& option) {
    struct stat status {};
    if (fstat(file, &status) != 0) cannot_read(path_, option, errno);
    if (S_ISDIR(status.st_mode)) {
        user_error("{}: '{}' is a directory; {}", option, path_, advice_for_directory(path_, option));
    }
    if (!S_ISREG(status.st_mode)) {
        user_error("{}: '{}' is not a regular file, but it is read several times; give a regular file",
                   option, path_);
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ == 0) user_error("{}: '{}' is empty; give a file with text", option, path_);

    void* mapping = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) cannot_read(path_, option, errno);
    data_ = static_cast<const std::uint8_t*>(mapping);
    device_ = status.st_dev;
    inode_ = status.st_ino;
}

MappedFile::~MappedFile() { munmap(const_cast<std::uint8_t*>(data_), size_); }

void MappedFile::require_whole() const {
    struct stat status {};
    // If the file was removed or replaced, the mapped bytes stay valid.
    const bool is_it =
        stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
    if (!is_it || static_cast<std::size_t>(status.st_size) >= size_) return;
    user_error("'{}' has {}, but had {} when the run began; restore it and continue with --resume", path_,
               plural(status.st_size, "byte"), grouped(static_cast<std::int64_t>(size_)));
}

namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::size_t header_words = 256;
constexpr std::size_t header_bytes = header_words * sizeof(std::int32_t);

// A token of type T at any alignment.
template <class T>
std::uint32_t token_at(const std::uint8_t* stored, std::size_t index) {
    T token;
    std::memcpy(&token, stored + index * sizeof(T), sizeof(T));
    return token;
}

// Converts stored tokens of type T to int32 and checks them against the vocabulary. They are part of `all`,
// where they begin at token `position`. `bits` are those of a token, without flags.
template <class T>
void convert(const std::uint8_t* stored, std::span<std::int32_t> out, std::int64_t vocabulary,
             const std::string& name, std::int64_t position, std::span<const std::uint8_t> all,
             std::uint32_t bits = ~0U) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const auto token = token_at<T>(stored, i) & bits;
        out[i] = static_cast<std::int32_t>(token);
        largest = std::max(largest, token);
    }
    if (largest < vocabulary) return;
    for (std::size_t i = 0; i < all.size() / sizeof(T); ++i)
        largest = std::max(largest, token_at<T>(all.data(), i) & bits);
    for (std::size_t i = 0; i < out.size(); ++i) {
        const auto token = static_cast<std::uint32_t>(out[i]);
        if (token < vocabulary) continue;
        user_error(
            "'{}' has {} {} at position {}, outside the vocabulary of {}; give --vocab-size {} or more", name,
            sizeof(T) == 1 ? "byte" : "token", token, position + static_cast<std::int64_t>(i), vocabulary,
            std::int64_t{largest} + 1);
    }
}

void check_range(std::int64_t first, std::size_t count, std::int64_t tokens) {
    check(first >= 0 && first <= tokens && static_cast<std::int64_t>(count) <= tokens - first,
          "tokens are read from within their shard");
}

class TextSource final : public TokenSource {
  public:
    TextSource(Text text, std::int64_t vocabulary) : text_(std::move(text)), vocabulary_(vocabulary) {}

    std::size_t shards() const override { return 1; }
    std::int64_t tokens(std::size_t) const override { return std::ssize(text_.bytes); }
    void read(std::size_t shard, std::int64_t first, std::span<std::int32_t> out) const override {
        check(shard == 0, "a text is one shard");
        check_range(first, out.size(), tokens(shard));
        if (text_.file) text_.file->require_whole();
        convert<std::uint8_t>(text_.bytes.data() + first, out, vocabulary_, text_.name,
                              text_.position + first, text_.whole.empty() ? text_.bytes : text_.whole);
    }

  private:
    Text text_;
    std::int64_t vocabulary_;
};

class Shard {
  public:
    Shard(std::string path, const std::string& option) : path_(std::move(path)), file_(path_, option) {
        const std::size_t size = file_.bytes().size();
        if (size < header_bytes) {
            user_error(
                "{}: '{}' has {}, less than a token shard's header of {}; give token shards, or a text "
                "whose name does not end in .bin",
                option, path_, plural(static_cast<std::int64_t>(size), "byte"), header_bytes);
        }
        std::array<std::int32_t, 3> header{};
        std::memcpy(header.data(), file_.bytes().data(), sizeof(header));
        const auto [magic, version, tokens] = header;

        const std::optional<int> bits = bits_of_tokens(file_.bytes());
        if (!bits) {
            user_error(
                "{}: '{}' is not a token shard: it begins with {}, not with 20240520 (16-bit tokens) or "
                "20240801 (32-bit); give token shards, or a text whose name does not end in .bin",
                option, path_, magic);
        }
        token_bytes_ = static_cast<std::size_t>(*bits / 8);
        has_rows_ = *bits == 32 && version == version_of_rows;
        const int known_version = *bits == 32 ? 7 : 1;
        if (version != known_version && !has_rows_) {
            user_error(
                "{}: '{}' is a token shard of version {}, but only version {} is supported; convert it",
                option, path_, version, known_version);
        }
        if (tokens < 0 || static_cast<std::size_t>(tokens) * token_bytes_ != size - header_bytes) {
            const auto follow = static_cast<std::int64_t>(size - header_bytes);
            user_error(
                "{}: '{}' is damaged or incomplete: its header says {}, but {} {}, which is {} of {} bytes; "
                "download or write it again",
                option, path_, plural(tokens, "token"), plural(follow, "byte"),
                follow == 1 ? "follows" : "follow",
                plural(follow / static_cast<std::int64_t>(token_bytes_), "token"), token_bytes_);
        }
        if (tokens == 0) user_error("{}: '{}' holds no tokens; leave it out", option, path_);
        tokens_ = tokens;
        std::memcpy(&tokenizer_, file_.bytes().data() + sizeof(header), sizeof(tokenizer_));
    }

    bool has_rows() const { return has_rows_; }
    // Appends the rows of this shard, which is one of several. UserError if they are not those of the header.
    void append_rows(std::size_t shard, std::vector<Row>& rows, const std::string& option) const {
        if ((stored_row_token(0) & begins_row) == 0)
            user_error("{}: '{}' is damaged: its first token begins no row; make it again", option, path_);
        const std::size_t before = rows.size();
        for (std::int64_t i = 0; i < tokens_; ++i) {
            const std::uint32_t stored = stored_row_token(i);
            if ((stored & begins_row) != 0) {
                rows.push_back({shard, i, 0, 0});
            } else if ((stored & is_counted) != 0) {  // the first token of a row is no target
                ++rows.back().targets;
            }
            ++rows.back().tokens;
        }
        const auto expected = token_at<std::int32_t>(file_.bytes().data(), 5);
        const auto found = static_cast<std::int64_t>(rows.size() - before);
        if (found != expected)
            user_error("{}: '{}' is damaged: its header says {}, but its tokens begin {}; make it again",
                       option, path_, plural(expected, "row"), grouped(found));
    }
    void read_targets(std::int64_t first, std::span<std::int32_t> out, std::int64_t vocabulary) const {
        read(first, out, vocabulary);
        for (std::size_t i = 0; has_rows_ && i < out.size(); ++i) {
            if ((stored_row_token(first + static_cast<std::int64_t>(i)) & is_counted) == 0)
                out[i] = ignored_target;
        }
    }

    std::int64_t tokens() const { return tokens_; }
    std::uint64_t tokenizer() const { return tokenizer_; }
    std::size_t token_bytes() const { return token_bytes_; }
    void read(std::int64_t first, std::span<std::int32_t> out, std::int64_t vocabulary) const {
        check_range(first, out.size(), tokens_);
        file_.require_whole();
        const std::span<const std::uint8_t> all = file_.bytes().subspan(header_bytes);
        const std::uint8_t* stored = all.data() + static_cast<std::size_t>(first) * token_bytes_;
        if (token_bytes_ == 2) {
            convert<std::uint16_t>(stored, out, vocabulary, path_, first, all);
        } else {
            convert<std::uint32_t>(stored, out, vocabulary, path_, first, all, has_rows_ ? ~flags : ~0U);
        }
    }

  private:
    static constexpr int version_of_rows = 8;
    static constexpr std::uint32_t is_counted = 1U << 31, begins_row = 1U << 30,
                                   flags = is_counted | begins_row;

    std::uint32_t stored_row_token(std::int64_t index) const {
        return token_at<std::uint32_t>(file_.bytes().data() + header_bytes, static_cast<std::size_t>(index));
    }

    std::string path_;
    MappedFile file_;
    std::size_t token_bytes_ = 0;
    bool has_rows_ = false;
    std::int64_t tokens_ = 0;
    std::uint64_t tokenizer_ = 0;
};

class ShardSource final : public TokenSource {
  public:
    ShardSource(const std::vector<std::string>& paths, std::int64_t vocabulary, const std::string& option)
        : vocabulary_(vocabulary) {
        for (const std::string& path : paths) shards_.push_back(std::make_unique<Shard>(path, option));
        for (std::size_t i = 0; i < shards_.size(); ++i) {
            if (shards_[i]->has_rows() != shards_[0]->has_rows())
                user_error(
                    "{}: one of '{}' and '{}' has conversations, and the other plain text; give files of one "
                    "kind",
                    option, paths[0], paths[i]);
            if (shards_[i]->has_rows()) shards_[i]->append_rows(i, rows_, option);
        }
    }

    std::size_t shards() const override { return shards_.size(); }
    std::int64_t tokens(std::size_t shard) const override { return shards_.at(shard)->tokens(); }
    std::int64_t shards_of_16_bits() const override {
        return std::ranges::count_if(shards_, [](const auto& shard) { return shard->token_bytes() == 2; });
    }
    std::uint64_t tokenizer_of(std::size_t shard) const override { return shards_.at(shard)->tokenizer(); }
    std::span<const Row> rows() const override { return rows_; }
    void read(std::size_t shard, std::int64_t first, std::span<std::int32_t> out) const override {
        shards_.at(shard)->read(first, out, vocabulary_);
    }
    void read_targets(std::size_t shard, std::int64_t first, std::span<std::int32_t> out) const override {
        shards_.at(shard)->read_targets(first, out, vocabulary_);
    }

  private:
    std::vector<std::unique_ptr<const Shard>> shards_;  // a mapping has one owner and does not move
    std::vector<Row> rows_;
    std::int64_t vocabulary_;
};

}  // namespace

std::int64_t TokenSource::tokens() const {
    std::int64_t sum = 0;
    for (std::size_t shard = 0; shard < shards(); ++shard) sum += tokens(shard);
    return sum;
}

std::optional<int> bits_of_tokens(std::span<const std::uint8_t> bytes) {
    std::int32_t magic = 0;
    if (bytes.size() < sizeof(magic)) return std::nullopt;
    std::memcpy(&magic, bytes.data(), sizeof(magic));
    return magic == 20240520 ? std::optional(16) : magic == 20240801 ? std::optional(32) : std::nullopt;
}

std::unique_ptr<TokenSource> make_text_source(Text text, std::int64_t vocabulary) {
    return std::make_unique<TextSource>(std::move(text), vocabulary);
}

std::unique_ptr<TokenSource> open_token_shards(const std::vector<std::string>& paths, std::int64_t vocabulary,
                                               const std::string& option) {
    return std::make_unique<ShardSource>(paths, vocabulary, option);
}

}  // namespace llmc
