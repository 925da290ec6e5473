// GPT-2's byte-pair encoding: UTF-8, words, merges of a small encoding made here, and its files.
// test/python/test_bpe.py compares GPT-2's own files with tiktoken.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/random.h"
#include "llmc/core/text.h"
#include "llmc/data/bpe.h"
#include "llmc/data/bpe_files.h"
#include "llmc/data/tokenizer.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;
using Tokens = std::vector<std::int32_t>;

std::vector<std::string> words_of(std::string_view text) {
    std::vector<std::string> words;
    while (!text.empty()) {
        words.emplace_back(text.substr(0, first_word(text)));
        text.remove_prefix(words.back().size());
    }
    return words;
}

TEST(Utf8, ReplacesWhatCouldHaveBegunACharacter) {
    // The results of Python's bytes.decode("utf-8", errors="replace").
    const std::string bad(replacement_bytes);
    EXPECT_EQ(with_replacements("a\xe2\x82\xac\xf0\x9f\x98\x80"), "a\xe2\x82\xac\xf0\x9f\x98\x80");
    EXPECT_EQ(with_replacements("\xe2\x82z"), bad + "z");  // cut off: both bytes together
    EXPECT_EQ(with_replacements("\xf0\x9f\x98"), bad);
    EXPECT_EQ(with_replacements("\xf0\x80\x80\x80"), bad + bad + bad + bad);  // overlong
    EXPECT_EQ(with_replacements("\xed\xa0\x80"), bad + bad + bad);            // a surrogate
    EXPECT_EQ(with_replacements("\xf5\x80\xc1\xff"), bad + bad + bad + bad);
    EXPECT_EQ(with_replacements("\xc3\xc3\xa9"), bad + "\xc3\xa9");
}

TEST(Words, AreGpt2s) {
    using Words = std::vector<std::string>;
    EXPECT_EQ(words_of("Hello, world!"), (Words{"Hello", ",", " world", "!"}));
    EXPECT_EQ(words_of("it's we'll I'LL 's"), (Words{"it", "'s", " we", "'ll", " I", "'", "LL", " '", "s"}));
    EXPECT_EQ(words_of("a  b\n c \n"), (Words{"a", " ", " b", "\n", " c", " \n"}));
    EXPECT_EQ(words_of("a\n\nb\t1"), (Words{"a", "\n", "\n", "b", "\t", "1"}));
    EXPECT_EQ(words_of("x1y 22.5"), (Words{"x", "1", "y", " 22", ".", "5"}));
    // No-break and ideographic spaces are white space, but not the space that a word takes with it.
    EXPECT_EQ(words_of("\xc2\xa0x\xe3\x80\x80 y"), (Words{"\xc2\xa0", "x", "\xe3\x80\x80", " y"}));
    // A letter, a combining mark (no letter), a Roman numeral. Then a letter of Unicode 16.0, and one of
    // 17.0, which is not in the table.
    EXPECT_EQ(words_of("e\xcc\x81\xe2\x85\xa7"), (Words{"e", "\xcc\x81", "\xe2\x85\xa7"}));
    EXPECT_EQ(words_of("a\xf0\x90\xb5\x8a"), (Words{"a\xf0\x90\xb5\x8a"}));
    EXPECT_EQ(words_of("a\xf0\xb2\x8e\xb0"), (Words{"a", "\xf0\xb2\x8e\xb0"}));
}

// Merges in their order: "lo", "low", " low", "er", "wer". In "lower", "low" takes the w, so "wer" cannot
// form.
constexpr std::string_view small_merges = "#version: 0.2\nl o\nlo w\nĠ low\ne r\nw er\n";

// encoder.json in the order of the ids.
std::string ids_of(std::string_view merges) {
    std::vector<std::string> names;
    const auto add = [&](char32_t code) {
        names.push_back(code < 0x80 ? std::string(1, static_cast<char>(code))
                                    : std::string{static_cast<char>(0xc0 | code >> 6),
                                                  static_cast<char>(0x80 | (code & 0x3f))});
    };
    for (char32_t byte = '!'; byte <= '~'; ++byte) add(byte);
    for (char32_t byte = 0xa1; byte <= 0xff; ++byte) {
        if (byte != 0xad) add(byte);
    }
    for (char32_t code = 0x100; names.size() < 256; ++code) add(code);
    merges.remove_prefix(merges.find('\n') + 1);
    while (!merges.empty()) {
        std::string line(merges.substr(0, merges.find('\n')));
        merges.remove_prefix(line.size() + 1);
        names.push_back(line.erase(line.find(' '), 1));
    }
    names.emplace_back(end_of_text_name);
    nlohmann::ordered_json ids;
    for (const std::string& name : names) ids[name] = ids.size();
    return ids.dump();
}

class SmallEncoding : public testing::Test {
  protected:
    SmallEncoding() { write(ids_of(small_merges), small_merges); }
    ~SmallEncoding() override { fs::remove_all(folder_); }

    void write(std::string_view ids, std::string_view merges) {
        fs::create_directories(folder_);
        std::ofstream(folder_ / bpe_ids_file) << ids;
        std::ofstream(folder_ / bpe_merges_file) << merges;
    }

    fs::path folder_ = fs::temp_directory_path() / ("llmc_bpe_test_" + std::to_string(getpid()));
};

// Ids of single bytes. '!' to '~' are 0 to 93. A space is 188 + 32: the 33rd of the bytes that are not
// printable.
constexpr std::int32_t id_of(char c) { return c == ' ' ? 220 : c - '!'; }

TEST_F(SmallEncoding, MergesTheLowestIdFirst) {
    const BytePairEncoder encoder = read_bpe(folder_);
    EXPECT_EQ(encoder.vocabulary(), 256 + 5 + 1);
    EXPECT_EQ(encoder.encode("low"), (Tokens{257}));
    EXPECT_EQ(encoder.encode("low low"), (Tokens{257, 258}));
    // "low" has a lower id than "wer" and merges first, although "er" could merge with the w.
    EXPECT_EQ(encoder.encode("lower"), (Tokens{257, 259}));
    EXPECT_EQ(encoder.encode("wer"), (Tokens{260}));
    EXPECT_EQ(encoder.encode("lolo"), (Tokens{256, 256}));
    EXPECT_EQ(encoder.encode("l o"), (Tokens{id_of('l'), id_of(' '), id_of('o')}));
    EXPECT_EQ(encoder.encode(""), Tokens());
}

TEST_F(SmallEncoding, OfEqualMergesTheLeftmostComesFirst) {
    constexpr std::string_view merges = "#version: 0.2\na a\n";
    write(ids_of(merges), merges);
    EXPECT_EQ(read_bpe(folder_).encode("aaaaa"), (Tokens{256, 256, id_of('a')}));
}

TEST_F(SmallEncoding, EndOfText) {
    const BytePairEncoder encoder = read_bpe(folder_);
    EXPECT_EQ(encoder.encode("low<|endoftext|>low"), (Tokens{257, 261, 257}));
    Tokens ordinary;
    encoder.encode_ordinary("<|endoftext|>", ordinary);
    EXPECT_EQ(ordinary.size(), 13U);
    EXPECT_EQ(encoder.decode(ordinary), "<|endoftext|>");
    EXPECT_EQ(encoder.decode(Tokens{257, 261}), "low<|endoftext|>");
}

TEST_F(SmallEncoding, TextComesBack) {
    const BytePairEncoder encoder = read_bpe(folder_);
    const RandomStream random(11, "bpe round trip");
    std::uint64_t number = 0;
    const auto below = [&](int limit) { return static_cast<int>(random.uniform(number++) * limit); };
    for (int round = 0; round < 200; ++round) {
        std::string text;
        for (int i = below(60); i > 0; --i)
            text += below(3) == 0 ? static_cast<char>(below(256)) : "lower \n'"[below(8)];
        Tokens tokens;
        encoder.encode_ordinary(text, tokens);
        EXPECT_EQ(encoder.decode(tokens), with_replacements(text));
    }
}

TEST_F(SmallEncoding, PromptsAndSamplesAreText) {
    const BytePairEncoder encoder = read_bpe(folder_);
    EXPECT_EQ(encode_prompt("low\\n<|endoftext|>", 262, &encoder), (Tokens{257, 198, 261}));
    EXPECT_EQ(encode_prompt("", 262, &encoder), (Tokens{261}));
    EXPECT_EQ(decode(Tokens{257, id_of('!')}, 262, &encoder), "low!");
    // The bytes of a character come one by one. The character is returned when all are there.
    const Tokens euro = encoder.encode("\xe2\x82\xac");
    ASSERT_EQ(euro.size(), 3U);
    TextStream stream(262, &encoder);
    EXPECT_EQ(stream.add(257), "low");
    EXPECT_EQ(stream.add(euro[0]), "");
    EXPECT_EQ(stream.add(euro[1]), "");
    EXPECT_EQ(stream.add(euro[2]), "\xe2\x82\xac");
    EXPECT_EQ(stream.add(euro[0]), "");
    EXPECT_EQ(stream.add(257), std::string(replacement_bytes) + "low");  // the character cannot become whole
    EXPECT_EQ(stream.add(euro[1]), replacement_bytes);                   // and no character begins with this
                                                                         // byte
    EXPECT_EQ(stream.add(euro[0]), "");
    EXPECT_EQ(stream.rest(), replacement_bytes);
}

// The one-line message of the refusal of a folder.
std::string refusal(const fs::path& folder) {
    try {
        read_bpe(folder);
    } catch (const UserError& fault) {
        return fault.what();
    }
    return "";
}

TEST_F(SmallEncoding, EveryDamagedByteIsFoundOrChangesNothing) {
    const std::string ids = ids_of(small_merges), merges(small_merges);
    const std::string all = "low lower wer! \xc3\xa9";
    const Tokens right = read_bpe(folder_).encode(all);
    int found = 0, total = 0;
    for (const bool of_ids : {true, false}) {
        const std::string& whole = of_ids ? ids : merges;
        for (std::size_t place = 0; place < whole.size(); ++place) {
            std::string damaged = whole;
            damaged[place] = static_cast<char>(damaged[place] ^ (place % 2 == 0 ? 1 : 0x80));
            if (of_ids) {
                write(damaged, merges);
            } else {
                write(ids, damaged);
            }
            total += 1;
            const std::string line = refusal(folder_);
            if (line.empty()) {
                EXPECT_EQ(read_bpe(folder_).encode(all), right) << place;
            } else {
                found += 1;
                EXPECT_EQ(line.find('\n'), std::string::npos);
                EXPECT_NE(line.find(of_ids ? bpe_ids_file : bpe_merges_file), std::string::npos) << line;
            }
        }
    }
    EXPECT_GT(found, total * 99 / 100);  // white space between JSON's values may differ
}

TEST_F(SmallEncoding, MissingFiles) {
    fs::remove(folder_ / bpe_merges_file);
    const std::string line = refusal(folder_);
    EXPECT_NE(line.find("there is no file"), std::string::npos) << line;
    EXPECT_NE(line.find(bpe_merges_file), std::string::npos) << line;
}

TEST_F(SmallEncoding, MustFitTheVocabulary) {
    EXPECT_EQ(find_bpe(folder_.string(), 262)->vocabulary(), 262);
    EXPECT_FALSE(find_bpe("", 262));
    try {
        find_bpe(folder_.string(), 256);
        FAIL();
    } catch (const UserError& fault) {
        const std::string line = fault.what();
        EXPECT_TRUE(line.starts_with("--bpe-dir: ")) << line;
        EXPECT_NE(line.find("has 262 tokens, but the model's vocabulary is 256"), std::string::npos) << line;
    }
}

}  // namespace
}  // namespace llmc
