// Files that are no texts or have other tokens than a run may expect: what is refused, and what is noted.
#include "llmc/data/text_file.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "test/unit/data_files.h"

namespace llmc {
namespace {

// In UTF-16 or UTF-32, with or without a mark.
std::string wide(std::string_view text, std::size_t bytes, bool is_big, std::string mark = "") {
    for (const char c : text) {
        std::string character(bytes, '\0');
        character[is_big ? bytes - 1 : 0] = c;
        mark += character;
    }
    return mark;
}

TEST_F(DataFiles, RefusesWhatIsNoText) {
    using namespace std::string_literals;
    const std::string text = "To be, or not to be, that is the question. ";
    const std::vector<std::pair<std::string, std::string>> refused = {
        {"\x1f\x8b\x08"s + text,
         "is compressed by gzip, and would be read as bytes; decompress it first (gunzip)"},
        {"\x28\xb5\x2f\xfd"s + text,
         "is compressed by zstd, and would be read as bytes; decompress it first (unzstd)"},
        {"\xfd"s + "7zXZ\0"s + text,
         "is compressed by xz, and would be read as bytes; decompress it first (unxz)"},
        {"BZh91AY&SY" + text,
         "is compressed by bzip2, and would be read as bytes; decompress it first (bunzip2)"},
        {"PK\x03\x04" + text, "is a zip archive, and would be read as bytes; decompress it first (unzip)"},
        {wide(text, 2, false, "\xff\xfe"),
         "is a text in UTF-16, and would be read as bytes; convert it first (iconv -f UTF-16 -t UTF-8)"},
        {wide(text, 2, true, "\xfe\xff"), "(iconv -f UTF-16 -t UTF-8)"},
        {wide(text, 4, false, "\xff\xfe\0\0"s),
         "is a text in UTF-32, and would be read as bytes; convert it first (iconv -f UTF-32 -t UTF-8)"},
        {wide(text, 4, true, "\0\0\xfe\xff"s), "(iconv -f UTF-32 -t UTF-8)"},
        {wide(text, 2, false),
         "is a text in UTF-16, and would be read as bytes; convert it first (iconv -f UTF-16LE -t UTF-8)"},
        {wide(text, 2, true), "(iconv -f UTF-16BE -t UTF-8)"},
    };
    const std::string sound = write("t.txt", text);
    for (const auto& [bytes, words] : refused) {
        const std::string file = write("x.txt", bytes);
        expect_refused([&] { open(file); }, {"--train-data: '" + file + "' ", words});
        expect_refused([&] { open(sound, file); }, {"--val-data: '" + file + "' ", words});
    }
    for (const auto& shard : {write_shard16("s16", {1, 2, 3}), write_shard32("s32", {1, 2, 3})})
        expect_refused([&] { open(shard); }, {"--train-data: '" + shard +
                                              "' is a token shard, but its name does not end in .bin, so it "
                                              "would be read as text; rename it"});
    // Texts that begin as such files do.
    for (const std::string& begin : {"BZh"s, "BZh9 is a name. "s, "PK"s, "7zXZ"s})
        EXPECT_TRUE(open(write("y.txt", begin + text)).notes.empty()) << begin;
    EXPECT_TRUE(open(write("y.txt", "\xc3\xa9\xe2\x82\xac" + text)).notes.empty());
}

TEST_F(DataFiles, NotesNulBytes) {
    using namespace std::string_literals;
    const std::string note = " has NUL bytes, so it may be no text; its bytes are read as they are";
    for (const std::string& bytes :
         {"a\0"s + std::string(100, 'x'), std::string(100, '\0'), std::string(100, 'x') + '\0'}) {
        const Data data = open(write("n.txt", bytes), write("v.txt", "abc"));
        EXPECT_EQ(data.notes, (std::vector<std::string>{path("n.txt") + note}));
        EXPECT_EQ(data.training->tokens(), std::ssize(bytes));
    }
}

// UTF-16 without a mark and without ASCII, and Latin-1. A character may be cut where the note ends to look.
TEST_F(DataFiles, NotesOtherEncodings) {
    using namespace std::string_literals;
    const std::string note = " is not valid UTF-8, so it may be no text; its bytes are read as they are";
    for (const std::string& bytes : {"\x66\x8e\x49\x6c\x57\x5b"s, "caf\xe9 au lait"s})
        EXPECT_EQ(open(write("n.txt", bytes), write("v.txt", "abc")).notes,
                  (std::vector<std::string>{path("n.txt") + note}));
    for (std::size_t before = 0; before < 4; ++before) {
        std::string text =
            std::string((1 << 16) - 3 + before - 3, 'x') + "\xf0\x9f\x99\x82" + std::string(50, 'y');
        EXPECT_TRUE(open(write("n.txt", text), write("v.txt", "abc")).notes.empty()) << before;
    }
}

TEST_F(DataFiles, NamesOfShardsMayBeInCapitals) {
    const Data data = open(write_shard16("X.BIN", {1, 2, 3, 4}), write_shard32("V.Bin", {5, 6}));
    EXPECT_EQ(read_all(*data.training, 0), (std::vector<std::int32_t>{1, 2, 3, 4}));
    EXPECT_EQ(read_all(*data.validation, 0), (std::vector<std::int32_t>{5, 6}));
    expect_refused([&] { open(write("T.BIN", std::string(2000, 'x'))); }, {"T.BIN' is not a token shard"});
}

TEST_F(DataFiles, Notes16BitTokensOfALargerVocabulary) {
    write_shard16("s_1.bin", {1, 500});
    write_shard32("s_2.bin", {1, 500});
    write_shard16("s_3.bin", {1, 500});
    const auto note = [&](const std::string& pattern, const std::string& shards) {
        return std::vector<std::string>{path(pattern) + " has " + shards +
                                        " of 16-bit tokens, none above 65,535, but the vocabulary is 65,537; "
                                        "if the tokenizer has more, write shards of 32-bit tokens (their "
                                        "header begins with 20240801 and 7)"};
    };
    EXPECT_EQ(open(path("s_*.bin"), "", 65'537).notes, note("s_*.bin", "2 token shards"));
    EXPECT_EQ(open(path("s_2.bin"), path("s_1.bin"), 65'537).notes, note("s_1.bin", "1 token shard"));
    EXPECT_TRUE(open(path("s_2.bin"), "", 65'537).notes.empty());
    EXPECT_TRUE(open(path("s_*.bin"), "", 65'536).notes.empty());
}

}  // namespace
}  // namespace llmc
