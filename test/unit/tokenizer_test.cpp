// Tokenizers: UTF-8, the merges of a small encoding made here, and their files. test/python/test_tokenizer.py compares
// larger ones with PyPI's `tokenizers`.
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
#include "llmc/data/prompt.h"
#include "llmc/data/tokenizer.h"
#include "llmc/data/tokenizer_files.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;
using Tokens = std::vector<std::int32_t>;

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
        std::ofstream(folder_ / gpt2_ids_file) << ids;
        std::ofstream(folder_ / gpt2_merges_file) << merges;
    }

    fs::path folder_ = fs::temp_directory_path() / ("llmc_bpe_test_" + std::to_string(getpid()));
};

// Ids of single bytes. '!' to '~' are 0 to 93. A space is 188 + 32: the 33rd of the bytes that are not
// printable.
constexpr std::int32_t id_of(char c) { return c == ' ' ? 220 : c - '!'; }

TEST_F(SmallEncoding, MergesTheLowestIdFirst) {
    const Tokenizer encoder = read_tokenizer(folder_);
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
    EXPECT_EQ(read_tokenizer(folder_).encode("aaaaa"), (Tokens{256, 256, id_of('a')}));
}

TEST_F(SmallEncoding, EndOfText) {
    const Tokenizer encoder = read_tokenizer(folder_);
    EXPECT_EQ(encoder.encode("low<|endoftext|>low"), (Tokens{257, 261, 257}));
    const Tokens ordinary = encoder.encode_ordinary("<|endoftext|>");
    EXPECT_EQ(ordinary.size(), 13U);
    EXPECT_EQ(encoder.decode(ordinary), "<|endoftext|>");
    EXPECT_EQ(encoder.decode(Tokens{257, 261}), "low<|endoftext|>");
}

TEST_F(SmallEncoding, TextComesBack) {
    const Tokenizer encoder = read_tokenizer(folder_);
    const RandomStream random(11, "bpe round trip");
    std::uint64_t number = 0;
    const auto below = [&](int limit) { return static_cast<int>(random.uniform(number++) * limit); };
    for (int round = 0; round < 200; ++round) {
        std::string text;
        for (int i = below(60); i > 0; --i)
            text += below(3) == 0 ? static_cast<char>(below(256)) : "lower \n'"[below(8)];
        EXPECT_EQ(encoder.decode(encoder.encode_ordinary(text)), with_replacements(text));
    }
}

TEST_F(SmallEncoding, PromptsAndSamplesAreText) {
    const Tokenizer encoder = read_tokenizer(folder_);
    EXPECT_EQ(encode_prompt("low\\n<|endoftext|>", 262, &encoder), (Tokens{257, 198, 261}));
    EXPECT_EQ(encode_prompt("", 262, &encoder), (Tokens{261}));
    EXPECT_EQ(printable(Tokens{257, id_of('!')}, &encoder), "low!");
    // The bytes of a character come one by one. The character is returned when all are there.
    const Tokens euro = encoder.encode("\xe2\x82\xac");
    ASSERT_EQ(euro.size(), 3U);
    TextStream stream(&encoder);
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
        read_tokenizer(folder);
    } catch (const UserError& fault) {
        return fault.what();
    }
    return "";
}

TEST_F(SmallEncoding, EveryDamagedByteIsFoundOrChangesNothing) {
    const std::string ids = ids_of(small_merges), merges(small_merges);
    const std::string all = "low lower wer! \xc3\xa9";
    const Tokens right = read_tokenizer(folder_).encode(all);
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
                EXPECT_EQ(read_tokenizer(folder_).encode(all), right) << place;
            } else {
                found += 1;
                EXPECT_EQ(line.find('\n'), std::string::npos);
                EXPECT_NE(line.find(of_ids ? gpt2_ids_file : gpt2_merges_file), std::string::npos) << line;
            }
        }
    }
    EXPECT_GT(found, total * 99 / 100);  // white space between JSON's values may differ
}

TEST_F(SmallEncoding, MissingFiles) {
    fs::remove(folder_ / gpt2_merges_file);
    const std::string line = refusal(folder_);
    EXPECT_NE(line.find("there is no file"), std::string::npos) << line;
    EXPECT_NE(line.find(gpt2_merges_file), std::string::npos) << line;
}

TEST_F(SmallEncoding, MustFitTheVocabulary) {
    std::vector<std::string> notes;
    EXPECT_EQ(open_tokenizer(folder_.string(), "--tokenizer", 262, notes)->vocabulary(), 262);
    EXPECT_EQ(open_tokenizer(folder_.string(), "", 300, notes)->vocabulary(), 262);
    EXPECT_FALSE(open_tokenizer("", "", 262, notes));
    EXPECT_TRUE(notes.empty());
    try {
        open_tokenizer(folder_.string(), "--tokenizer", 256, notes);
        FAIL();
    } catch (const UserError& fault) {
        const std::string line = fault.what();
        EXPECT_TRUE(line.starts_with("--tokenizer: ")) << line;
        EXPECT_NE(line.find("has 262 tokens, but the model's vocabulary is 256"), std::string::npos) << line;
    }
    // Nobody asked for the tokenizer of the model's folder.
    EXPECT_FALSE(open_tokenizer(folder_.string(), "", 256, notes));
    ASSERT_EQ(notes.size(), 1U);
    EXPECT_NE(notes[0].find("has 262 tokens"), std::string::npos) << notes[0];
}

TEST(ByteTokenizer, EveryByteIsAToken) {
    std::vector<std::string> notes;
    const auto bytes = open_tokenizer("", "", 256, notes);
    ASSERT_TRUE(bytes);
    EXPECT_EQ(bytes->encode("a\xff"), (Tokens{97, 255}));
    EXPECT_EQ(bytes->decode(Tokens{97, 255, 256}), "a\xff");
    EXPECT_EQ(bytes->checksum(), 0U);
    EXPECT_EQ(encode_prompt("", 256, &*bytes), (Tokens{'\n'}));
}

// A tokenizer.json with two merges and, of the bytes, only those of "alow ".
class JsonTokenizer : public testing::Test {
  protected:
    JsonTokenizer()
        : json_(nlohmann::ordered_json::parse(R"({
            "added_tokens": [
                {"id": 7, "content": "<s>", "special": true, "normalized": false},
                {"id": 0, "content": "<tag>", "special": false, "normalized": false, "rstrip": true}],
            "normalizer": {"type": "Sequence", "normalizers": []},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": " ?\\p{L}+"}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}},
            "model": {"type": "BPE",
                      "vocab": {"<tag>": 0, "l": 1, "o": 2, "w": 3, "lo": 4, "low": 5, "Ġ": 6, "<s>": 7, "a": 8},
                      "merges": ["l o", ["lo", "w"]]}})")) {
        fs::create_directories(folder_);
    }
    ~JsonTokenizer() override { fs::remove_all(folder_); }

    Tokenizer read(const std::string& text) const {
        std::ofstream(folder_ / tokenizer_file) << text;
        return read_tokenizer(folder_);
    }
    // What a refusal says behind the file's name.
    std::string refusal_with(const char* pointer, const nlohmann::ordered_json& value) const {
        auto changed = json_;
        changed[nlohmann::ordered_json::json_pointer(pointer)] = value;
        std::ofstream(folder_ / tokenizer_file) << changed.dump();
        const std::string line = refusal(folder_),
                          begin = fmt::format("'{}': ", (folder_ / tokenizer_file).string());
        EXPECT_TRUE(line.empty() || line.starts_with(begin)) << line;
        return line.empty() ? line : line.substr(begin.size());
    }

    nlohmann::ordered_json json_;
    fs::path folder_ = fs::temp_directory_path() / ("llmc_json_tokenizer_test_" + std::to_string(getpid()));
};

TEST_F(JsonTokenizer, SpecialTokensCountOnlyInPrompts) {
    const Tokenizer tokenizer = read(json_.dump());
    EXPECT_EQ(tokenizer.vocabulary(), 9);
    EXPECT_EQ(tokenizer.encode("low<s> lo"), (Tokens{5, 7, 6, 4}));
    // < and s are no tokens, so nothing remains of them.
    EXPECT_EQ(tokenizer.encode_ordinary("low<s> lo"), (Tokens{5, 6, 4}));
    EXPECT_EQ(tokenizer.encode_ordinary("a<tag>  \nlow"), (Tokens{8, 0, 5}));
    EXPECT_EQ(tokenizer.decode(Tokens{7, 5, 99, -1}), "<s>low");
    // The beginning comes once, whether the prompt has it or not.
    EXPECT_EQ(encode_prompt("low", 9, &tokenizer), (Tokens{7, 5}));
    EXPECT_EQ(encode_prompt("<s>low", 9, &tokenizer), (Tokens{7, 5}));
    EXPECT_EQ(encode_prompt("", 9, &tokenizer), (Tokens{7}));
}

TEST_F(JsonTokenizer, WordsThatAreTokensNeedNoMerges) {
    json_["model"]["vocab"]["wol"] = 9;
    EXPECT_EQ(read(json_.dump()).encode("wol"), (Tokens{3, 2, 1}));
    json_["model"]["ignore_merges"] = true;
    EXPECT_EQ(read(json_.dump()).encode("wol"), (Tokens{9}));
}

TEST_F(JsonTokenizer, ChecksumIsThatOfWhatIsComputed) {
    const std::uint64_t sum = read(json_.dump()).checksum();
    auto same = json_;
    same["truncation"] = {{"max_length", 5}};
    same["model"]["merges"] = {"l o", "lo w"};
    EXPECT_EQ(read(same.dump(2)).checksum(), sum);
    auto other = json_;
    other["model"]["merges"] = {"l o"};
    EXPECT_NE(read(other.dump()).checksum(), sum);
    other = json_;
    other["normalizer"] = {{"type", "NFC"}};
    EXPECT_NE(read(other.dump()).checksum(), sum);
}

TEST_F(JsonTokenizer, RefusesByName) {
    using Json = nlohmann::ordered_json;
    const auto has = [&](const char* pointer, const Json& value, std::string_view words) {
        const std::string line = refusal_with(pointer, value);
        EXPECT_NE(line.find(words), std::string::npos) << pointer << ": " << line;
        EXPECT_EQ(line.find('\n'), std::string::npos);
    };
    has("/normalizer", {{"type", "Lowercase"}}, R"(its normalizer is {"type":"Lowercase"})");
    has("/pre_tokenizer", {{"type", "Metaspace"}}, "Metaspace");
    has("/pre_tokenizer", nullptr, "no ByteLevel");
    has("/pre_tokenizer/pretokenizers/1/add_prefix_space", true, "add_prefix_space");
    has("/pre_tokenizer/pretokenizers/0/behavior", "Removed", "Removed");
    has("/pre_tokenizer/pretokenizers/0/pattern/Regex", "a|(b)\\1", "the pattern 'a|(b)\\1': it has \\1");
    has("/model/type", "Unigram", "its model is \"Unigram\"");
    has("/model/byte_fallback", true, "SentencePiece");
    has("/model/unk_token", "<unk>", "unk_token");
    has("/model/vocab/w", 2, "two tokens have the id 2");
    has("/model/vocab/w", -1, "the id of 'w'");
    has("/model/vocab", Json::array(), "not an object");
    has("/model/merges/1", "lo", "merge 2: expected two tokens");
    has("/model/merges/1", "w o", "merge 2: 'wo' has no id");
    has("/added_tokens/1/id", 1, "'<tag>' has two ids");
    has("/added_tokens/0/id", 1, "'<s>' has two ids");
    has("/added_tokens/-", {{"id", 10}, {"content", "<x>"}},
        "the id of '<x>' is 10, and not the next one, 9");
    has("/added_tokens/-", {{"id", 1}, {"content", "<x>"}}, "the id of '<x>' is 1, and not the next one, 9");
    has("/added_tokens/0/single_word", true, "single_word");
    has("/post_processor/type", "BertProcessing", "BertProcessing");
    EXPECT_EQ(refusal_with("/version", "1.0"), "");
}

TEST_F(JsonTokenizer, DamagedFilesAreRefusedInOneLineOrRead) {
    const std::string whole = json_.dump();
    for (std::size_t place = 0; place < whole.size(); ++place) {
        for (const bool cuts : {false, true}) {
            std::string damaged = cuts ? whole.substr(0, place) : whole;
            if (!cuts) damaged[place] = static_cast<char>(damaged[place] ^ (place % 2 == 0 ? 1 : 0x80));
            std::ofstream(folder_ / tokenizer_file) << damaged;
            const std::string line = refusal(folder_);
            EXPECT_EQ(line.find('\n'), std::string::npos);
            EXPECT_TRUE(!cuts || !line.empty()) << place;
        }
    }
}

}  // namespace
}  // namespace llmc
