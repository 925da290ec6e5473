// Token shards of conversations: a row is a sample, only some of its targets count, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/data/data.h"
#include "llmc/data/samples.h"
#include "llmc/data/token_source.h"
#include "llmc/device/ops.h"
#include "test/unit/data_files.h"

namespace llmc {
namespace {

constexpr std::uint32_t begins = 1U << 30, counts = 1U << 31;
constexpr std::uint64_t checksum = 0xfedcba9876543210;
constexpr std::int32_t none = ignored_target;

class DataRows : public DataFiles {
  protected:
    // A shard of these stored tokens. `rows` is what its header says; negative for the right number.
    std::string write_rows(const std::string& name, const std::vector<std::uint32_t>& tokens,
                           std::uint64_t tokenizer = 0, std::int32_t rows = -1) const {
        const auto own = std::ranges::count_if(tokens, [](std::uint32_t of) { return (of & begins) != 0; });
        return write_shard(
            name,
            {20240801, 8, static_cast<std::int32_t>(tokens.size()), static_cast<std::int32_t>(tokenizer),
             static_cast<std::int32_t>(tokenizer >> 32), rows < 0 ? static_cast<std::int32_t>(own) : rows},
            tokens);
    }
    std::string write_plain(const std::string& name, std::uint64_t tokenizer) const {
        return write_shard<std::uint16_t>(name,
                                          {20240520, 1, 3, static_cast<std::int32_t>(tokenizer),
                                           static_cast<std::int32_t>(tokenizer >> 32)},
                                          {1, 2, 3});
    }

    // Rows of 4, 2 and 3 tokens, with 2, 1 and 2 targets that count. The first token of a row is never a target.
    const std::vector<std::uint32_t> three = {begins | 10, counts | 11, 12,          counts | 13, begins | 20,
                                              counts | 21, begins | 30, counts | 31, counts | 32};
};

// Each sample as (inputs, targets).
using Pair = std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>;
template <class Samples>
Pair read(const Samples& samples, std::int64_t index, std::size_t T) {
    Pair sample{std::vector<std::int32_t>(T, -7), std::vector<std::int32_t>(T, -7)};
    samples.read(index, sample.first, sample.second);
    return sample;
}

const std::vector<Pair> of_three = {{{10, 11, 12, 0, 0}, {11, none, 13, none, none}},
                                    {{20, 0, 0, 0, 0}, {21, none, none, none, none}},
                                    {{30, 31, 0, 0, 0}, {31, 32, none, none, none}}};

TEST_F(DataRows, ARowIsASampleOnceAnEpoch) {
    const auto source = open_token_shards({write_rows("a.bin", three)}, 50, "--train-data");
    const TrainingSamples samples(*source, 5, 3);
    EXPECT_TRUE(samples.has_rows());
    ASSERT_EQ(samples.windows(), 3);
    EXPECT_EQ(training_windows(*source, 5), 3);
    std::set<std::vector<Pair>> orders;
    for (std::int64_t epoch = 0; epoch < 50; ++epoch) {
        std::vector<Pair> seen;
        std::int64_t targets = 0;
        for (std::int64_t i = 3 * epoch; i < 3 * epoch + 3; ++i) {
            seen.push_back(read(samples, i, 5));
            const auto counted = std::ranges::count_if(seen.back().second, [](auto t) { return t != none; });
            EXPECT_EQ(samples.targets(i, 1), counted);
            targets += counted;
        }
        EXPECT_EQ(samples.targets(3 * epoch, 3), targets);
        orders.insert(seen);
        EXPECT_TRUE(std::ranges::is_permutation(seen, of_three));
    }
    EXPECT_EQ(orders.size(), 6U);  // one is missed with p = 6 (5/6)^50 = 7e-4 for another seed
    EXPECT_EQ(samples.targets(1, 6), 10);
}

TEST_F(DataRows, ValidationReadsThemInOrder) {
    const auto source = open_token_shards({write_rows("b.bin", three), write_rows("a.bin", three)}, 50, "x");
    const ValidationWindows validation(*source, 5);
    ASSERT_EQ(validation.windows(), 6);
    for (std::int64_t i = 0; i < 6; ++i)
        EXPECT_EQ(read(validation, i, 5), of_three[static_cast<std::size_t>(i % 3)]) << i;
    const std::vector<std::int64_t> targets = {0, 2, 3, 5, 7, 8, 10};
    for (std::int64_t i = 0; i <= 6; ++i)
        EXPECT_EQ(validation.targets(i), targets[static_cast<std::size_t>(i)]);
    // What counts is part of what is validated.
    std::vector<std::uint32_t> other = three;
    other[2] |= counts;
    const auto changed = open_token_shards({write_rows("c.bin", other)}, 50, "x");
    EXPECT_NE(validation.fingerprint(1), ValidationWindows(*changed, 5).fingerprint(1));
}

TEST_F(DataRows, ArePartOfTheData) {
    const Data data = open(write_rows("train.bin", three), write_rows("val.bin", three), 50, 3);
    EXPECT_EQ(data.training_description,
              "token shard " + path("train.bin") + ", 9 tokens in 3 conversations, of which 5 count");
    EXPECT_EQ(data.epoch_tokens, 9);
    EXPECT_EQ(data.record.at("train-data").samples, 3);
    EXPECT_EQ(data.record.at("val-data").samples, 3);
    EXPECT_FALSE(data.unigram_loss);
    EXPECT_EQ(data.too_short, "");
}

TEST_F(DataRows, WrongOnesAreRefused) {
    const auto refused = [&](const std::string& file, std::initializer_list<std::string> parts,
                             std::int64_t T = 3) { expect_refused([&] { open(file, "", 50, T); }, parts); };
    refused(write_rows("long.bin", three),
            {"--train-data: the conversation at token 0 of '", "long.bin' has 4 tokens", "--seq-len 2 ",
             "give --seq-len 3", "--max-tokens 3"},
            2);
    refused(write_rows("later.bin",
                       {begins | 1, counts | 2, begins | 1, 2, 2, counts | 3, begins | 1, counts | 2, 2}),
            {"the conversation at token 2 of '", "--seq-len 3"}, 2);
    // The mark of a row's first token does not make it a target.
    refused(write_rows("uncounted.bin", {begins | 1, counts | 2, begins | counts | 1, 2}),
            {"the conversation at token 2 of '",
             "uncounted.bin' has no token that the loss counts; leave it out"});
    refused(write_rows("number.bin", three, 0, 4),
            {"number.bin' is damaged: its header says 4 rows, but its tokens begin 3; make it again"});
    refused(write_rows("first.bin", {1, counts | 2, begins | 3, counts | 4}, 0, 1),
            {"first.bin' is damaged: its first token begins no row"});
    // Found when it is read: its marks are not part of the token.
    const auto outside =
        open_token_shards({write_rows("outside.bin", {begins | 1, counts | 50, counts | 3})}, 50, "x");
    expect_refused([&] { read(TrainingSamples(*outside, 3, 1), 0, 3); },
                   {"outside.bin' has token 50 at position 1, outside the vocabulary of 50; give "
                    "--vocab-size 51 or more"});
    write_rows("mixed_0.bin", three);
    write_shard32("mixed_1.bin", {1, 2, 3, 4});
    refused(path("mixed_*.bin"),
            {"mixed_0.bin' and '", "mixed_1.bin' has conversations, and the other plain text"});
    DataOptions four{.train_data = path("long.bin"), .val_data = "", .vocabulary = 50, .sequence_length = 3};
    four.sequences = 4;
    expect_refused([&] { open_data(four); }, {"--train-data is too short", "one step needs 4 conversations",
                                              "--global-batch-tokens of at most 9"});
}

TEST_F(DataRows, ATokenizerIsTheModels) {
    const auto data_of = [&](const std::string& train, const std::string& val, std::uint64_t tokenizer) {
        return open_data({.train_data = train,
                          .val_data = val,
                          .vocabulary = 50,
                          .sequence_length = 3,
                          .tokenizer = tokenizer});
    };
    const std::string own = write_rows("own.bin", three, checksum),
                      other = write_plain("other.bin", checksum + 1),
                      silent = write_rows("silent.bin", three);
    EXPECT_EQ(data_of(own, "", checksum).tokenizer, checksum);
    EXPECT_EQ(data_of(own, "", 0).tokenizer,
              checksum);  // for the checkpoint of a run whose model does not say
    EXPECT_TRUE(data_of(own, "", 0).notes.empty() && data_of(own, "", checksum).notes.empty());
    EXPECT_TRUE(data_of(silent, "", 0).notes.empty());
    EXPECT_EQ(
        data_of(own, silent, checksum).notes,
        std::vector<std::string>{
            silent + " has 1 token shard that does not say which tokenizer made it; the model's is assumed"});
    expect_refused([&] { data_of(own, other, checksum); },
                   {"--val-data: '", "other.bin' was made with another tokenizer than the model's",
                    "fedcba9876543211, and not fedcba9876543210"});
    expect_refused([&] { data_of(own, "", checksum + (std::uint64_t{1} << 32)); },
                   {"own.bin' was made with another"});
    expect_refused([&] { data_of(own, other, 0); },
                   {"other.bin' was made with another tokenizer than the shards before it"});
}

}  // namespace
}  // namespace llmc
