#include "llmc/data/text_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/data/token_source.h"

namespace llmc {

namespace {

using Bytes = std::span<const std::uint8_t>;
using namespace std::string_view_literals;  // some marks have a NUL byte

struct Compressed {
    std::string_view magic, is, command;
};
constexpr std::array compressed = {
    Compressed{"\x1f\x8b", "compressed by gzip", "gunzip"},
    Compressed{"\x28\xb5\x2f\xfd", "compressed by zstd", "unzstd"},
    Compressed{"\xfd"
               "7zXZ"sv,
               "compressed by xz", "unxz"},
    Compressed{"BZh", "compressed by bzip2", "bunzip2"},
    Compressed{"PK\x03\x04", "a zip archive", "unzip"},
};
// "BZh", a digit and these bytes: a text may begin with the first three.
constexpr std::string_view block_of_bzip2 = "1AY&SY";

struct Encoding {
    std::string_view mark, name;
};
// UTF-32 comes first: its little-endian mark begins as that of UTF-16.
constexpr std::array encodings = {
    Encoding{"\xff\xfe\0\0"sv, "UTF-32"},
    Encoding{"\0\0\xfe\xff"sv, "UTF-32"},
    Encoding{"\xff\xfe"sv, "UTF-16"},
    Encoding{"\xfe\xff"sv, "UTF-16"},
};

std::string_view beginning(Bytes bytes) {
    constexpr std::size_t most = 1 << 16;
    return {reinterpret_cast<const char*>(bytes.data()), std::min(bytes.size(), most)};
}

bool is_compressed(std::string_view begin, const Compressed& kind) {
    return begin.starts_with(kind.magic) &&
           (kind.command != "bunzip2" ||
            begin.substr(std::min<std::size_t>(begin.size(), 4)).starts_with(block_of_bzip2));
}

// The encoding, as iconv names it; empty if it may be UTF-8. In UTF-16 without a mark, every other byte of ASCII's
// characters is 0, and the bytes between them seldom are.
std::string_view wide_encoding(std::string_view begin) {
    for (const Encoding& encoding : encodings)
        if (begin.starts_with(encoding.mark)) return encoding.name;
    std::array<std::size_t, 2> zeros{};
    for (std::size_t i = 0; i < begin.size(); ++i) zeros[i % 2] += begin[i] == 0 ? 1 : 0;
    const std::size_t pairs = begin.size() / 2;
    const auto is_high = [&](std::size_t high) {
        return 2 * zeros[high] > pairs && 100 * zeros[1 - high] <= pairs;
    };
    return is_high(1) ? "UTF-16LE" : is_high(0) ? "UTF-16BE" : "";
}

}  // namespace

void require_text(const std::string& path, Bytes bytes, const std::string& option) {
    const std::string_view begin = beginning(bytes);
    if (bits_of_tokens(bytes))
        user_error(
            "{}: '{}' is a token shard, but its name does not end in .bin, so it would be read as text; "
            "rename it",
            option, path);
    for (const Compressed& kind : compressed)
        if (is_compressed(begin, kind))
            user_error("{}: '{}' is {}, and would be read as bytes; decompress it first ({})", option, path,
                       kind.is, kind.command);
    if (const std::string_view encoding = wide_encoding(begin); !encoding.empty())
        user_error(
            "{}: '{}' is a text in {}, and would be read as bytes; convert it first (iconv -f {} -t UTF-8)",
            option, path, encoding.substr(0, 6), encoding);
}

std::string note_if_no_text(const std::string& path, Bytes bytes) {
    std::string_view begin = beginning(bytes);
    const bool has_nul = begin.find('\0') != std::string_view::npos;
    // Its last character may be cut.
    constexpr std::size_t longest_character = 4;
    if (begin.size() < bytes.size())
        for (std::size_t cut = 1; cut < longest_character && !is_utf8(begin); ++cut) begin.remove_suffix(1);
    if (!has_nul && is_utf8(begin)) return "";
    return fmt::format("{} {}, so it may be no text; its bytes are read as they are", path,
                       has_nul ? "has NUL bytes" : "is not valid UTF-8");
}

}  // namespace llmc
