// Text and token shards as sources of tokens, the data that open_data makes from a user's options, and every
// refusal of data.
#include "llmc/data/token_source.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/data/data.h"
#include "llmc/data/stories/stories.h"
#include "test/unit/data_files.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

// ---- Sources ---------------------------------------------------------------------------------------------

TEST_F(DataFiles, TextIsBytes) {
    const auto file = std::make_shared<const std::string>("Hi \xe2\x82\xac\n");
    const auto source = make_text_source(
        {"x", file, {reinterpret_cast<const std::uint8_t*>(file->data()), file->size()}}, 256);
    EXPECT_EQ(source->shards(), 1U);
    EXPECT_EQ(source->tokens(), 7);
    EXPECT_EQ(read_all(*source, 0), (std::vector<std::int32_t>{'H', 'i', ' ', 0xe2, 0x82, 0xac, '\n'}));
    std::vector<std::int32_t> two(2);
    source->read(0, 3, two);
    EXPECT_EQ(two, (std::vector<std::int32_t>{0xe2, 0x82}));
    EXPECT_THROW(source->read(0, 6, two), ProgrammingError);
    EXPECT_THROW(source->read(0, -1, two), ProgrammingError);
    EXPECT_THROW(source->read(1, 0, two), ProgrammingError);
}

TEST_F(DataFiles, ShardsOfBothKindsAreReadInOrder) {
    const std::string b = write_shard16("b.bin", {5, 65535, 0, 7}),
                      a = write_shard32("a.bin", {100000, 2, 1});
    const auto source = open_token_shards({b, a}, 200000, "--train-data");
    EXPECT_EQ(source->shards(), 2U);
    EXPECT_EQ(source->tokens(0), 4);
    EXPECT_EQ(source->tokens(1), 3);
    EXPECT_EQ(source->tokens(), 7);
    EXPECT_EQ(read_all(*source, 0), (std::vector<std::int32_t>{5, 65535, 0, 7}));
    EXPECT_EQ(read_all(*source, 1), (std::vector<std::int32_t>{100000, 2, 1}));
    std::vector<std::int32_t> two(2);
    source->read(1, 1, two);
    EXPECT_EQ(two, (std::vector<std::int32_t>{2, 1}));
    EXPECT_THROW(source->read(1, 2, two), ProgrammingError);
}

TEST_F(DataFiles, ThereMayBeMoreShardsThanAProcessMayOpen) {
    std::vector<std::string> shards;
    for (std::uint16_t i = 0; i < 100; ++i)
        shards.push_back(write_shard16(std::to_string(i) + ".bin", {i, static_cast<std::uint16_t>(i + 1)}));
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit few{.rlim_cur = 50, .rlim_max = before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    EXPECT_EQ(read_all(*open_token_shards(shards, 256, "--train-data"), 99),
              (std::vector<std::int32_t>{99, 100}));
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(DataFiles, WhatWasRemovedOrReplacedIsReadAsItWas) {
    const std::string removed = write_shard16("a.bin", {1, 2}), replaced = write_shard16("b.bin", {3, 4});
    const auto source = open_token_shards({removed, replaced}, 256, "--train-data");
    fs::remove(removed);
    fs::rename(write("empty", ""), replaced);
    EXPECT_EQ(read_all(*source, 0), (std::vector<std::int32_t>{1, 2}));
    EXPECT_EQ(read_all(*source, 1), (std::vector<std::int32_t>{3, 4}));
}

TEST_F(DataFiles, TokensOutsideTheVocabularyAreRefusedWhenRead) {
    const auto small = open_token_shards({write_shard16("a.bin", {1, 2, 50, 3})}, 50, "--train-data");
    std::vector<std::int32_t> two(2);
    small->read(0, 0, two);  // this one reads tokens within the vocabulary
    expect_refused([&] { small->read(0, 1, two); },
                   {"a.bin'", "token 50 ", "position 2,", "vocabulary of 50;", "--vocab-size 51 "});
    const auto wide = open_token_shards({write_shard32("b.bin", {1, 0x80000000, 2})}, 50257, "--train-data");
    expect_refused([&] { wide->read(0, 0, two); },
                   {"b.bin'", "token 2147483648 ", "position 1,", "vocabulary of 50257;"});
    EXPECT_NO_THROW(open_token_shards({path("a.bin")}, 51, "--train-data")->read(0, 1, two));
}

// ---- A user's options ------------------------------------------------------------------------------------

TEST_F(DataFiles, NothingIsTheEmbeddedStories) {
    const Data data = open("");
    const Stories stories(embedded_stories_seed, embedded_stories_bytes);
    ASSERT_TRUE(data.validation);
    EXPECT_EQ(data.training->tokens(), 1'800'000);
    EXPECT_EQ(data.validation->tokens(), 200'000);
    const auto training = read_all(*data.training, 0), validation = read_all(*data.validation, 0);
    EXPECT_TRUE(std::equal(training.begin(), training.end(), stories.text().begin()));
    EXPECT_TRUE(std::equal(validation.begin(), validation.end(), stories.text().begin() + 1'800'000));
    EXPECT_EQ(data.source_entropy, stories.entropy(1'800'000, 2'000'000));
    ASSERT_TRUE(data.unigram_loss);
    EXPECT_GT(*data.unigram_loss, 2.5);
    EXPECT_LT(*data.unigram_loss, 3.5);
    EXPECT_EQ(data.training_description, "first 90% of the embedded stories, 1,800,000 tokens");
    EXPECT_EQ(data.validation_description, "last 10% of the embedded stories, 200,000 tokens");
}

TEST_F(DataFiles, StoriesWithOtherValidationAreWhole) {
    const Data data = open("", write("val.txt", "some text"));
    EXPECT_EQ(data.training->tokens(), 2'000'000);
    EXPECT_EQ(data.validation->tokens(), 9);
    EXPECT_FALSE(data.source_entropy);
    EXPECT_EQ(data.training_description, "the embedded stories, 2,000,000 tokens");
}

TEST_F(DataFiles, TextIsSplit) {
    std::string text(1003, 'x');
    text[901] = 'y';
    text[902] = 'z';
    const Data data = open(write("t.txt", text));
    EXPECT_EQ(data.training->tokens(), 902);  // 902.7 rounded down
    EXPECT_EQ(data.validation->tokens(), 101);
    EXPECT_EQ(read_all(*data.training, 0).back(), 'y');
    EXPECT_EQ(read_all(*data.validation, 0).front(), 'z');
    EXPECT_FALSE(data.source_entropy);
    EXPECT_EQ(data.training_description, "first 90% of " + path("t.txt") + ", 902 tokens");
    EXPECT_EQ(data.validation_description, "last 10% of " + path("t.txt") + ", 101 tokens");
    EXPECT_EQ(data.too_short, "");
}

TEST_F(DataFiles, AByteOrderMarkIsNoText) {
    const std::string mark = "\xef\xbb\xbf", text(100, 'x');
    const Data data = open(write("t.txt", mark + text), write("v.txt", mark + "abc"));
    EXPECT_EQ(read_all(*data.training, 0), std::vector<std::int32_t>(100, 'x'));
    EXPECT_EQ(read_all(*data.validation, 0), (std::vector<std::int32_t>{'a', 'b', 'c'}));
    const std::string skipped = " begins with a UTF-8 byte order mark, which is skipped";
    EXPECT_EQ(data.notes, (std::vector<std::string>{path("t.txt") + skipped, path("v.txt") + skipped}));
    const Data divided = open(path("t.txt"));
    EXPECT_EQ(divided.training->tokens(), 90);
    EXPECT_EQ(divided.validation->tokens(), 10);
    // Elsewhere, and if it is not whole, it is text. A part of it is no UTF-8.
    for (const auto& [other, notes] : {std::pair(mark.substr(0, 2) + text, 2U), {text + mark, 1U}}) {
        const Data whole = open(write("o.txt", other), path("v.txt"));
        EXPECT_EQ(whole.training->tokens(), std::ssize(other));
        EXPECT_EQ(whole.notes.size(), notes);
    }
    // A position is that in the file.
    std::vector<std::int32_t> one(1);
    const Data small = open(path("t.txt"), path("v.txt"), 'y');
    EXPECT_NO_THROW(small.training->read(0, 0, one));
    expect_refused([&] { open(write("o.txt", mark + "abz"), path("v.txt"), 'y'); },
                   {"o.txt' has byte 122 at position 5,", "--vocab-size 123 or more"});
    expect_refused([&] { open(write("m.txt", mark)); },
                   {"m.txt' has only a byte order mark; give a file with text"});
}

TEST_F(DataFiles, TextWithValidationIsWhole) {
    const Data data = open(write("t.txt", std::string(100, 'x')), write_shard16("v.bin", {1, 2, 3}));
    EXPECT_EQ(data.training->tokens(), 100);
    EXPECT_EQ(data.validation->tokens(), 3);
    EXPECT_EQ(data.validation_description, "token shard " + path("v.bin") + ", 3 tokens");
}

TEST_F(DataFiles, PatternsAreSortedShards) {
    write_shard16("train_10.bin", {10, 10});
    write_shard32("train_02.bin", {2, 2, 2});
    write_shard16("train_01.bin", {1});
    write_shard16("other.bin", {77});
    const Data data = open(path("train_*.bin"));
    ASSERT_EQ(data.training->shards(), 3U);
    EXPECT_EQ(read_all(*data.training, 0), (std::vector<std::int32_t>{1}));
    EXPECT_EQ(read_all(*data.training, 1), (std::vector<std::int32_t>{2, 2, 2}));
    EXPECT_EQ(read_all(*data.training, 2), (std::vector<std::int32_t>{10, 10}));
    EXPECT_FALSE(data.validation);
    EXPECT_EQ(data.validation_description, "");
    EXPECT_EQ(data.training_description, "3 token shards " + path("train_*.bin") + ", 6 tokens");
    EXPECT_EQ(data.too_short,
              "1 of 3 shards, 1 token: a sample needs 2 tokens in a row (--seq-len 1 and one more)");
    EXPECT_EQ(data.epoch_tokens, 2 + 1);
    EXPECT_EQ(open(path("train_*0*")).training->shards(), 3U);  // a pattern need not end in .bin
    EXPECT_EQ(open(path("train_1*"), path("train_0?.bin")).validation->shards(), 2U);
}

TEST_F(DataFiles, NamesMayLookLikePatterns) {
    write_shard16("1.bin", {1, 2, 3});
    EXPECT_EQ(read_all(*open(write_shard16("[1].bin", {4, 5})).training, 0),
              (std::vector<std::int32_t>{4, 5}));
}

TEST_F(DataFiles, UnigramLossCountsWithOneAdded) {
    // Two of 3 tokens are 0 and one is 1: p = 3/6, 2/6, 1/6.
    const std::string training = write_shard16("t.bin", {0, 0, 1});
    const double on_validation = (std::log(6.0 / 3) + std::log(6.0 / 1) + std::log(6.0 / 1)) / 3;
    const double on_training = (2 * std::log(6.0 / 3) + std::log(6.0 / 2)) / 3;
    EXPECT_NEAR(*open(training, write_shard16("v.bin", {0, 2, 2}), 3).unigram_loss, on_validation, 1e-15);
    EXPECT_NEAR(*open(training, "", 3).unigram_loss, on_training, 1e-15);
    // The same from several shards, with more tokens than are read at once.
    std::vector<std::uint16_t> many(100'000, 0);
    std::fill(many.begin() + 90'000, many.end(), std::uint16_t{1});
    write_shard16("many_1.bin", many);
    write_shard16("many_2.bin", many);
    const double p0 = 180'001.0 / 200'003, p1 = 20'001.0 / 200'003;
    EXPECT_NEAR(*open(path("many_*.bin"), "", 3).unigram_loss, -0.9 * std::log(p0) - 0.1 * std::log(p1),
                1e-12);
}

TEST_F(DataFiles, NoUnigramLossBeyond100MillionTokens) {
    // Sparse files: they take no room on the disk.
    const auto sparse = [&](const std::string& name, std::int32_t tokens) {
        std::string file = write_shard<std::uint16_t>(name, {20240520, 1, tokens}, {});
        fs::resize_file(file, 1024 + 2 * static_cast<std::uintmax_t>(tokens));
        return file;
    };
    const std::string most = sparse("most.bin", 99'999'998);
    const Data data = open(most, write_shard16("v.bin", {0, 0, 0}));
    EXPECT_EQ(data.training->tokens(), 99'999'998);
    EXPECT_FALSE(data.unigram_loss);
    EXPECT_TRUE(open(sparse("less.bin", 1'000'000), path("v.bin")).unigram_loss);
}

// Whatever the name under which it is found.
TEST_F(DataFiles, RefusesToValidateOnATrainingFile) {
    write_shard16("train_1.bin", {1, 2, 3});
    write_shard16("val_1.bin", {1, 2, 3});  // equal, but another file
    EXPECT_NO_THROW(open(path("train_*"), path("val_*")));
    expect_refused([&] { open(path("*.bin"), path("val_*")); },
                   {"--val-data: '", "val_1.bin' is in --train-data too", "'train_*.bin' and 'val_*.bin'"});
    const std::string text = write("t.txt", std::string(100, 'x'));
    expect_refused([&] { open(text, text); }, {"t.txt' is in --train-data too",
                                               "leave out --val-data, and the last 10% of the text is"});
    fs::create_symlink("train_1.bin", path("linked.bin"));
    fs::create_hard_link(path("train_1.bin"), path("also.bin"));
    for (const char* name : {"train_1.bin", "linked.bin", "also.bin"})
        expect_refused([&] { open(path("train_*"), path(name)); },
                       {std::string(name) + "' is in --train-data"});
    EXPECT_TRUE(open_data({.train_data = path("train_1.bin"),
                           .val_data = path("train_1.bin"),
                           .vocabulary = 256,
                           .sequence_length = 1,
                           .trains = false})
                    .validation);
}

TEST_F(DataFiles, SuggestedShardsAreThoseOfTheSplitByTheirNames) {
    struct Case {
        std::vector<std::string> files;
        std::string training, validation;  // parts of the two messages
    };
    const std::vector<Case> cases = {
        {{"train_1.bin", "val_0.bin"}, "/train_*.bin'", "/val_*.bin'"},
        {{"fineweb_train_000001.bin", "fineweb_val_000000.bin"}, "/*train*.bin'", "/*val*.bin'"},
        {{"tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"}, "/*train*.bin'", "/*val*.bin'"},
        {{"train.bin", "val.bin"}, "/*train*.bin'", "/*val*.bin'"},
        {{"Train-1.bin", "Validation-1.bin"}, "/*Train*.bin'", "/*Validation*.bin'"},
        {{"train_1.bin", "train_2.bin", "test_1.bin", "validation_1.bin"}, "/train_*.bin'", "/test_*.bin'"},
        // Words of the dataset's name say nothing.
        {{"medieval_train.bin", "medieval_val.bin"}, "/*train*.bin'", "/*[_.-]val*.bin'"},
        {{"test_train_1.bin", "test_val_1.bin"}, "/*train*.bin'", "/*val*.bin'"},
        {{"train_interval.bin", "other.bin"}, "/train_*.bin'", "that does not match train_interval.bin"},
        {{"val_000.bin"}, "for validation by their names (val_000.bin); give training shards", "/val_*.bin'"},
        {{"train_1.bin", "train_2.bin"},
         "/train_*.bin'",
         "for training by their names (train_1.bin and 1 more)"},
        {{"shard_1.bin", "val_1.bin"}, "that does not match val_1.bin", "/val_*.bin'"},
        {{"a.bin"}, "/*.bin'", "/*.bin'"},
    };
    for (const Case& one : cases) {
        fs::remove_all(path("d"));
        fs::create_directories(path("d"));
        for (const std::string& file : one.files) write_shard16("d/" + file, {1, 2, 3});
        expect_refused([&] { open(path("d")); }, {"--train-data", "d' is a directory; ", one.training});
        expect_refused([&] { open("", path("d")); }, {"--val-data", "d' is a directory; ", one.validation});
    }
}

TEST_F(DataFiles, TrainingOnValidationShardsIsNoted) {
    for (const char* name : {"web_train_1.bin", "web_train_2.bin", "web_val_0.bin"})
        write_shard16(name, {1, 2, 3});
    EXPECT_EQ(
        open(path("*.bin")).notes,
        std::vector{"--train-data '" + path("*.bin") +
                    "' matches shards that are for validation by their names (web_val_0.bin); to leave them "
                    "out and validate on them, give --train-data '" +
                    path("*train*.bin") + "' --val-data '" + path("*val*.bin") + "'"});
    EXPECT_TRUE(open(path("*train*.bin")).notes.empty());
    EXPECT_TRUE(open(path("*train*.bin"), path("*val*.bin")).notes.empty());
    EXPECT_TRUE(open(path("*val*.bin")).notes.empty());
}

// ---- Refusals --------------------------------------------------------------------------------------------

TEST_F(DataFiles, RefusesWhatCannotBeRead) {
    for (const bool validation : {false, true}) {
        const std::string option = validation ? "--val-data" : "--train-data";
        const auto open_as = [&](const std::string& name) {
            return [=, this] { validation ? open("", path(name)) : open(path(name)); };
        };
        expect_refused(open_as("none.txt"), {option, "no file", "none.txt'"});
        expect_refused(open_as("none.bin"), {option, "no file", "none.bin'"});
        expect_refused(open_as("none*.bin"), {option, "no file matches", "none*.bin'", "in quotes"});
        expect_refused(open_as("[x"), {option, "no file matches"});
        fs::create_directories(path("folder"));
        fs::create_directories(path("folder.bin"));
        expect_refused(open_as("folder"), {option, "folder' is a directory", "folder/*.bin'"});
        fs::create_directories(path("dataset"));
        const std::string split = validation ? "val_" : "train_";
        write("dataset/other.bin", "");
        expect_refused(open_as("dataset"), {option, "dataset/*.bin'"});
        write("dataset/" + split + "notes.txt", "");
        expect_refused(open_as("dataset"), {option, "dataset/*.bin'"});
        write("dataset/" + split + "7.bin", "");
        expect_refused(open_as("dataset"), {option, "dataset/" + split + "*.bin'"});
        fs::remove_all(path("dataset"));
        expect_refused(open_as("folder.bin"), {option, "folder.bin' is a directory"});
        write("empty.txt", "");
        write("empty.bin", "");
        expect_refused(open_as("empty.txt"), {option, "empty.txt' is empty"});
        expect_refused(open_as("empty.bin"), {option, "empty.bin' is empty"});
        // A file inside a file, and a link to itself: even root cannot read them.
        write("plain.txt", "text");
        expect_refused(open_as("plain.txt/inside"), {option, "cannot read", "Not a directory"});
        fs::remove(path("loop.txt"));
        fs::create_symlink("loop.txt", path("loop.txt"));
        expect_refused(open_as("loop.txt"), {option, "cannot read", "symbolic links"});
        fs::remove(path("pipe"));
        ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
        expect_refused(open_as("pipe"), {option, "not a regular file"});
        if (geteuid() != 0) {
            fs::permissions(write("secret.txt", "x"), fs::perms::none);
            expect_refused(open_as("secret.txt"), {option, "cannot read", "Permission denied"});
        }
        write_shard16("mix_a.bin", {1, 2});
        write("mix_b.txt", "text");
        write("mix_c.txt", "text");
        expect_refused(open_as("mix_*"), {option, "matches 3 files, 1 of them token shards"});
        expect_refused(open_as("mix_*.txt"),
                       {option, "matches 2 files, 0 of them token shards", "one text file"});
    }
}

TEST_F(DataFiles, RefusesDamagedShards) {
    const std::vector<std::uint16_t> tokens = {1, 2, 3, 4};
    const auto refuse = [&](const std::vector<std::int32_t>& header,
                            std::initializer_list<std::string> parts) {
        expect_refused([&] { open(write_shard("bad.bin", header, tokens)); }, parts);
    };
    EXPECT_NO_THROW(open(write_shard("good.bin", {20240520, 1, 4}, tokens)));
    EXPECT_NO_THROW(open(write_shard("good.bin", {20240801, 7, 2}, tokens), "", 1 << 20));
    expect_refused([&] { open(write("bad.bin", std::string(1023, '\0'))); },
                   {"--train-data", "bad.bin' has 1,023 bytes", "header of 1024", ".bin"});
    refuse({20240521, 1, 4}, {"--train-data", "bad.bin' is not a token shard", "20240521"});
    refuse({20240520, 7, 4}, {"bad.bin'", "version 7", "only version 1 "});
    refuse({20240801, 1, 2}, {"bad.bin'", "version 1", "only version 7 "});
    refuse({20240520, 1, 5},
           {"bad.bin' is damaged", "says 5 tokens, but 8 bytes follow, which is 4 tokens of 2 bytes"});
    refuse({20240520, 1, 3}, {"bad.bin' is damaged", "says 3 tokens"});
    refuse({20240520, 1, -4}, {"bad.bin' is damaged", "says -4 tokens"});
    refuse({20240520, 1, 0}, {"bad.bin' is damaged", "says 0 tokens"});
    refuse({20240520, 1, 0x7fffffff}, {"bad.bin' is damaged", "says 2,147,483,647 tokens"});
    refuse({20240801, 7, 4}, {"bad.bin' is damaged", "which is 2 tokens of 4 bytes"});
    refuse({20240801, 7, -2147483647 - 1}, {"bad.bin' is damaged"});
    expect_refused(
        [&] {
            open(write_shard<std::uint16_t>("bad.bin", {20240520, 1, 0}, {}));
        },
        {"bad.bin' holds no tokens"});
    std::vector<std::uint8_t> odd(7);
    expect_refused(
        [&] {
            open(write_shard("bad.bin", {20240520, 1, 3}, odd));
        },
        {"bad.bin' is damaged", "7 bytes follow"});
    // One bad shard among good ones, also in the validation data.
    write_shard16("s_1.bin", {1, 2, 3});
    write_shard("s_2.bin", {20240520, 1, 5}, tokens);
    expect_refused([&] { open(path("s_*.bin")); }, {"--train-data", "s_2.bin' is damaged"});
    expect_refused([&] { open("", path("s_2.bin")); }, {"--val-data", "s_2.bin' is damaged"});
}

TEST_F(DataFiles, RefusesTokensOutsideTheVocabulary) {
    std::string text(100, 'a');
    text[95] = 'z';
    const std::string file = write("t.txt", text);
    expect_refused([&] { open(file, "", 'z'); },
                   {"t.txt'", "byte 122 ", "position 95,", "vocabulary of 122;", "--vocab-size 123 "});
    EXPECT_NO_THROW(open(file, "", 'z' + 1));
    expect_refused(
        [&] {
            open(write_shard16("t.bin", {3, 9, 4}), "", 9);
        },
        {"t.bin'", "token 9 ", "position 1,"});
    expect_refused([&] { open("", "", 100); }, {"the embedded stories'", "vocabulary of 100;"});
}

TEST_F(DataFiles, RefusesTooFewTokens) {
    // 90% of 72 is 64, 90% of 73 is 65: a window of 64 and one more token.
    expect_refused([&] { open(write("t.txt", std::string(72, 'a')), "", 256, 64); },
                   {"--train-data", "first 90% of", "t.txt, 64 tokens", "needs 65 tokens", "--seq-len 64"});
    EXPECT_NO_THROW(open(write("t.txt", std::string(73, 'a')), "", 256, 64));
    write_shard16("s_1.bin", {1, 2, 3, 4});
    write_shard16("s_2.bin", {1, 2, 3, 4});
    expect_refused([&] { open(path("s_*.bin"), "", 256, 4); },
                   {"2 token shards", "8 tokens", "needs 5 tokens in a row"});
    EXPECT_NO_THROW(open(path("s_*.bin"), "", 256, 3));
    expect_refused([&] { open(path("s_*.bin"), write_shard16("v.bin", {1}), 256, 3); },
                   {"--val-data", "v.bin, 1 token;", "at least 2"});
    EXPECT_NO_THROW(open(path("s_*.bin"), write_shard16("v.bin", {1, 2}), 256, 3));
}

}  // namespace
}  // namespace llmc
