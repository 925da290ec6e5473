// The record of a run's data, and what is said of two records that differ.
#include "llmc/data/data_record.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace llmc {
namespace {

FileRecord file(const std::string& name, std::int64_t bytes = 10, std::int64_t tokens = 10,
                const std::string& ends = "x") {
    return {.name = name, .bytes = bytes, .tokens = tokens, .ends = ends};
}

std::string said(std::vector<FileRecord> here, std::vector<FileRecord> others) {
    return difference(OptionRecord{.files = std::move(here), .samples = 1},
                      OptionRecord{.files = std::move(others), .samples = 1});
}

TEST(DataRecord, SaysWhatDiffers) {
    const FileRecord a = file("a", 1), b = file("b", 2), c = file("c", 3), d = file("d", 4);
    EXPECT_EQ(said({a, b}, {a, b}), "");
    EXPECT_EQ(said({a}, {a, b}), "b is missing");
    EXPECT_EQ(said({a, b, c}, {a}), "b and 1 more are additional");
    EXPECT_EQ(said({a, c, d}, {a, b}), "b is missing, and c and 1 more are additional");
    EXPECT_EQ(said({c}, {a, b}), "c instead of a and 1 more");
    EXPECT_EQ(said({}, {a}), "nothing instead of a");
    EXPECT_EQ(said({b, a}, {a, b}), "b is at another place in the order of the files");
    EXPECT_EQ(said({a, file("b", 1)}, {a, b}), "b has 1 byte instead of 2");
    EXPECT_EQ(said({a, file("b", 2, 10, "y")}, {a, b}), "b has other contents of the same length");
    EXPECT_EQ(said({file("a", 10, 9)}, {file("a")}),
              "a: 9 tokens instead of 10 (without --val-data, the last tenth of a training text is for "
              "validation)");
}

TEST(DataRecord, NamesAloneAreNoDifference) { EXPECT_EQ(said({file("a")}, {file("b")}), ""); }

TEST(DataRecord, NumbersOfSamplesAreCompared) {
    const OptionRecord two{.files = {file("a")}, .samples = 2}, one{.files = {file("a")}, .samples = 1};
    EXPECT_EQ(difference(one, two), "1 sample instead of 2");
}

TEST(DataRecord, NamesTheOption) {
    const DataRecord training{{"train-data", {{file("a")}, 1}}};
    DataRecord both = training;
    both["val-data"] = {{file("v")}, 1};
    EXPECT_EQ(difference(both, both), "");
    EXPECT_EQ(difference(training, both), "--val-data: nothing instead of v");
    EXPECT_EQ(difference(both, training), "--val-data: v instead of nothing");
    EXPECT_EQ(difference(data_record(to_text(both)), both), "");
}

// The name without its directory, the size, and a checksum that changes with any byte of either end.
TEST(DataRecord, OfAFile) {
    std::vector<std::uint8_t> bytes(200'000, 1);
    const FileRecord record = record_of("some/folder/x.bin", bytes, 7);
    EXPECT_EQ(record.name, "x.bin");
    EXPECT_EQ(record.bytes, 200'000);
    EXPECT_EQ(record.tokens, 7);
    for (const std::size_t changed : {0U, 1024U, 65'535U, 134'464U, 199'999U}) {
        std::vector<std::uint8_t> other = bytes;
        other[changed] = 2;
        EXPECT_NE(record_of("x.bin", other, 7).ends, record.ends) << changed;
    }
    const std::vector<std::uint8_t> small = {1, 2, 3}, reversed = {3, 2, 1};
    EXPECT_NE(record_of("x", small, 3).ends, record_of("x", reversed, 3).ends);
}

}  // namespace
}  // namespace llmc
