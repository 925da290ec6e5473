// HellaSwag's rows and scores, computed by hand. test/python/test_hellaswag.py compares the losses and whole
// scores with PyTorch.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "llmc/data/tokenizer.h"
#include "llmc/train/hellaswag.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

class HellaSwagFile : public testing::Test {
  protected:
    HellaSwagFile() {
        std::ofstream(path_)
            << R"({"ctx": "abc", "endings": ["d", "ef", "ghi", "jklmn"], "label": 1, "ind": 7})"
               "\n\n"
               R"({"label": "3", "endings": ["p", "q", "r", "s"], "ctx": "o"})";
    }
    ~HellaSwagFile() override { fs::remove(path_); }

    HellaSwag read(std::int64_t sequence_length, std::int64_t limit = 0) const {
        Model model;
        model.sequence_length = sequence_length;
        model.vocabulary = 256;
        const Tokenizer bytes = Tokenizer::of_bytes();
        return {path_.string(), limit, model, &bytes};
    }

    // A row's inputs and its targets. '.' stands for an ignored target, '_' for input 0.
    static std::string text_of(const HellaSwag& data, std::int64_t row, std::size_t sequence_length) {
        std::vector<std::int32_t> inputs(sequence_length, 99), targets(sequence_length, 99);
        data.read(row, inputs, targets);
        std::string text;
        for (const std::int32_t token : inputs) text += token == 0 ? '_' : static_cast<char>(token);
        text += '|';
        for (const std::int32_t token : targets) text += token == -1 ? '.' : static_cast<char>(token);
        return text;
    }

    fs::path path_ = fs::temp_directory_path() / ("llmc_hellaswag_test_" + std::to_string(getpid()));
};

TEST_F(HellaSwagFile, EndingsAreTargets) {
    const HellaSwag data = read(8);
    EXPECT_EQ(data.examples(), 2);
    EXPECT_EQ(data.rows(), 8);
    EXPECT_EQ(text_of(data, 0, 8), "abc ____|.. d....");
    EXPECT_EQ(text_of(data, 2, 8), "abc gh__|.. ghi..");
    EXPECT_EQ(text_of(data, 3, 8), "abc jklm|.. jklmn");
    EXPECT_EQ(text_of(data, 7, 8), "o ______| s......");
    EXPECT_EQ(read(8, 1).examples(), 1);
    EXPECT_EQ(read(8, 5).examples(), 2);
}

// As Python's json reads it and tiktoken encodes it. A surrogate pair is one character. No escape begins
// after \\.
TEST_F(HellaSwagFile, HalfOfAPairOfSurrogatesIsReplaced) {
    std::ofstream(path_) << R"({"ctx": "\ud800", "endings": ["\\ud800!", "\ud83d\ude00!", "\ude00\uD83D!", )"
                            R"("\ud800\ud83d\ude00\"!"], "label": 0})";
    const HellaSwag data = read(32);
    const auto inputs = [&](std::int64_t row) {  // all but the last token
        const std::string text = text_of(data, row, 32);
        return text.substr(0, text.find('_'));
    };
    EXPECT_EQ(inputs(0), "\uFFFD \\ud800");
    EXPECT_EQ(inputs(1), "\uFFFD \U0001F600");
    EXPECT_EQ(inputs(2), "\uFFFD \uFFFD\uFFFD");
    EXPECT_EQ(inputs(3), "\uFFFD \uFFFD\U0001F600\"");
}

TEST_F(HellaSwagFile, TheLastTokensOfALongRowRemain) {
    const HellaSwag data = read(4);
    EXPECT_EQ(text_of(data, 0, 4), "abc |.. d");
    EXPECT_EQ(text_of(data, 1, 4), "bc e|. ef");
    EXPECT_EQ(text_of(data, 2, 4), "c gh| ghi");
    EXPECT_EQ(text_of(data, 3, 4), "jklm|klmn");
}

TEST_F(HellaSwagFile, ScoresBySumAndByMean) {
    const HellaSwag data = read(8);
    // The first example's endings have 2, 3, 4 and 6 targets. By sum its first ending leads; by mean the
    // second does, which is right. In the other example each ending has 2 targets, and the last leads.
    const HellaSwagScore score = data.score(std::vector<double>{5, 6, 9, 13, 3, 4, 5, 2});
    EXPECT_EQ(score.examples, 2);
    EXPECT_EQ(score.accuracy, 0.5);
    EXPECT_EQ(score.accuracy_norm, 1.0);
    // The first of equal endings leads.
    EXPECT_EQ(data.score(std::vector<double>(8, 0.0)).accuracy, 0.0);
}

TEST_F(HellaSwagFile, ALongEndingHasNoMoreTargetsThanTheSequence) {
    // Means over 2, 3, 4 and 4 (of 6) targets: 2, 1.3, 2 and 1.4. Over all 6, the last ending would lead.
    EXPECT_EQ(read(4, 1).score(std::vector<double>{4, 3.9, 8, 5.6}).accuracy_norm, 1.0);
}

}  // namespace
}  // namespace llmc
