// Prompts, printed text, and the choice of the next token.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/random.h"
#include "llmc/core/text.h"
#include "llmc/data/prompt.h"
#include "llmc/data/tokenizer.h"
#include "llmc/train/token_choice.h"

namespace llmc {
namespace {

using Tokens = std::vector<std::int32_t>;

TEST(Prompt, OfBytes) {
    const Tokenizer bytes = Tokenizer::of_bytes();
    EXPECT_EQ(encode_prompt("", 256, &bytes), (Tokens{'\n'}));
    EXPECT_EQ(encode_prompt("", 256, &bytes, 5), (Tokens{5}));
    EXPECT_EQ(encode_prompt("a\\n\\t\\\\b\\x", 256, &bytes), (Tokens{'a', '\n', '\t', '\\', 'b', '\\', 'x'}));
    EXPECT_EQ(encode_prompt("\xc3\xa9", 256, &bytes), (Tokens{0xc3, 0xa9}));
}

TEST(Prompt, OfIds) {
    EXPECT_EQ(encode_prompt("", 50257), (Tokens{50256}));
    EXPECT_EQ(encode_prompt("", 100), (Tokens{0}));
    EXPECT_EQ(encode_prompt("", 100, nullptr, 5), (Tokens{5}));
    EXPECT_EQ(encode_prompt("7 8", 100, nullptr, 5), (Tokens{7, 8}));
    EXPECT_EQ(encode_prompt(" 5  99 ", 100), (Tokens{5, 99}));
    for (const char* wrong : {"100", "-1", "5 a", "5,6", "99999999999"}) {
        EXPECT_THROW((void)encode_prompt(wrong, 100), UserError) << wrong;
    }
}

std::string decode_bytes(const std::string& bytes) {
    Tokens tokens;
    for (const char c : bytes) tokens.push_back(static_cast<unsigned char>(c));
    const Tokenizer all = Tokenizer::of_bytes();
    return printable(tokens, &all);
}

TEST(TextStream, PrintsOnlyUtf8) {
    const std::string bad = "\xef\xbf\xbd";
    EXPECT_EQ(decode_bytes("a\n\tb"), "a\n\tb");
    EXPECT_EQ(decode_bytes("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    EXPECT_EQ(decode_bytes("\x1b[31m"), bad + "[31m");                   // an escape sequence
    EXPECT_EQ(decode_bytes("\xc3"), bad);                                // cut off
    EXPECT_EQ(decode_bytes("\xc0\xaf"), bad + bad);                      // overlong
    EXPECT_EQ(decode_bytes("\xed\xa0\x80"), bad + bad + bad);            // a surrogate
    EXPECT_EQ(decode_bytes("\xf4\x90\x80\x80"), bad + bad + bad + bad);  // beyond U+10FFFF
    EXPECT_EQ(printable(Tokens{3, 70000}, nullptr), "3 70000");
}

TEST(TextStream, StreamsWholeCharacters) {
    const std::vector<std::string> pieces = {"a",
                                             "\xc3\xa9",
                                             "\xe0\xa4\x85",
                                             "\xed\x9f\xbf",
                                             "\xe2\x82\xac",
                                             "\xf0\x9f\x98\x80",
                                             "\xf4\x8f\xbf\xbf",
                                             "b"};
    const Tokenizer bytes = Tokenizer::of_bytes();
    TextStream stream(&bytes);
    for (const std::string& piece : pieces) {
        for (std::size_t i = 0; i < piece.size(); ++i) {
            const std::string text = stream.add(static_cast<unsigned char>(piece[i]));
            EXPECT_EQ(text, i + 1 < piece.size() ? "" : piece) << i;
        }
    }
    // Bytes that cannot become a character are given at once, with those after them.
    const std::string bad = "\xef\xbf\xbd";
    EXPECT_EQ(stream.add(0xf0), "");
    EXPECT_EQ(stream.add('x'), bad + "x");
    EXPECT_EQ(stream.add(0xe0), "");
    EXPECT_EQ(stream.add(0x80), bad + bad);  // overlong
    EXPECT_EQ(stream.add(0xff), bad);
    EXPECT_EQ(stream.add(0xe2), "");
    EXPECT_EQ(stream.add(0x82), "");
    EXPECT_EQ(stream.rest(), bad);  // an unfinished character becomes one replacement
    TextStream ids;
    EXPECT_EQ(ids.add(7), "7");
    EXPECT_EQ(ids.add(999), " 999");
    EXPECT_EQ(ids.rest(), "");
}

TEST(Sampler, TakesTheLikeliestAtTemperatureZero) {
    const std::vector<float> logits = {0, 3, 2, 3};
    EXPECT_EQ(sample_token(logits, {.temperature = 0}, 0.99), 1);
}

TEST(Sampler, FollowsTheSoftmax) {
    const std::vector<float> logits = {0, 1, 2, -1};
    const RandomStream random(7, "sampler test");
    constexpr int draws = 20000;
    for (const double temperature : {1.0, 0.5}) {
        std::map<std::int32_t, double> counts;
        for (int i = 0; i < draws; ++i) {
            counts[sample_token(logits, {.temperature = temperature},
                                random.uniform(static_cast<std::uint64_t>(i)))] += 1;
        }
        double total = 0;
        for (const float logit : logits) total += std::exp(static_cast<double>(logit) / temperature);
        for (std::int32_t token = 0; token < 4; ++token) {
            const double p =
                std::exp(static_cast<double>(logits[static_cast<std::size_t>(token)]) / temperature) / total;
            // Five standard deviations of a binomial share.
            EXPECT_NEAR(counts[token] / draws, p, 5 * std::sqrt(p * (1 - p) / draws)) << token;
        }
    }
}

TEST(Sampler, KeepsToTheTopK) {
    const std::vector<float> logits = {0, 1, 2, -1, 2};
    for (int i = 0; i < 100; ++i) {
        const std::int32_t token = sample_token(logits, {.temperature = 1, .top_k = 2}, i / 100.0);
        EXPECT_TRUE(token == 2 || token == 4) << token;
    }
    EXPECT_EQ(sample_token(logits, {.temperature = 1, .top_k = 1}, 0.999), 2);
    EXPECT_EQ(sample_token(logits, {.temperature = 1e-3}, std::nextafter(1.0, 0.0)), 4);
}

// The probabilities are 0.4, 0.3, 0.2, 0.1.
TEST(Sampler, KeepsToTheTopP) {
    std::vector<float> logits;
    for (const double p : {0.2, 0.4, 0.1, 0.3}) logits.push_back(static_cast<float>(std::log(p)));
    const auto chosen = [&](const SamplerOptions& options) {
        std::set<std::int32_t> tokens;
        for (int i = 0; i < 100; ++i) tokens.insert(sample_token(logits, options, i / 100.0));
        return tokens;
    };
    using Set = std::set<std::int32_t>;
    EXPECT_EQ(chosen({.top_p = 1}), (Set{0, 1, 2, 3}));
    EXPECT_EQ(chosen({.top_p = 0.95}), (Set{0, 1, 2, 3}));
    EXPECT_EQ(chosen({.top_p = 0.85}), (Set{0, 1, 3}));
    EXPECT_EQ(chosen({.top_p = 0.65}), (Set{1, 3}));
    EXPECT_EQ(chosen({.top_p = 0.35}), (Set{1}));
    EXPECT_EQ(chosen({.top_p = 0}), (Set{1}));
    // After top-k, 0.4 and 0.3 remain; the first has more than half.
    EXPECT_EQ(chosen({.top_k = 2, .top_p = 0.55}), (Set{1}));
    // A temperature of 0.5 squares them: 16 : 9 : 4 : 1.
    EXPECT_EQ(chosen({.temperature = 0.5, .top_p = 0.8}), (Set{1, 3}));
}

// More tokens than the sampler sorts at first.
TEST(Sampler, KeepsToTheTopPOfManyTokens) {
    std::vector<float> logits(1000);
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i % 500) * 1e-6F;
    std::set<std::int32_t> tokens;
    for (int i = 0; i < 5000; ++i) tokens.insert(sample_token(logits, {.top_p = 0.5}, i / 5000.0));
    EXPECT_NEAR(static_cast<double>(tokens.size()), 500, 1);
    for (const std::int32_t token : tokens) EXPECT_GE(token % 500, 249);
}

TEST(Console, WritesNumbersForPeople) {
    EXPECT_EQ(grouped(0), "0");
    EXPECT_EQ(grouped(999), "999");
    EXPECT_EQ(grouped(1000), "1,000");
    EXPECT_EQ(grouped(-123456), "-123,456");
    EXPECT_EQ(grouped(1234567), "1,234,567");
    EXPECT_EQ(human_bytes(512), "512 B");
    EXPECT_EQ(human_bytes(1536), "1.5 KiB");
    EXPECT_EQ(plural(1, "process", "es"), "1 process");
    EXPECT_EQ(plural(2, "process", "es"), "2 processes");
}

TEST(Text, BytesBeyond64Bits) {
    EXPECT_EQ(human_bytes(std::size_t{1} << 60), "1.0 EiB");
    EXPECT_EQ(human_bytes(0x1p100), "1,099,511,627,776 EiB");
}

TEST(Text, NearestName) {
    const std::vector<std::string> names = {"lr", "layers", "lr-schedule", "heads"};
    EXPECT_EQ(nearest_name("layerz", names), "layers");
    EXPECT_EQ(nearest_name("lr-shedule", names), "lr-schedule");
    EXPECT_EQ(nearest_name("ehads", names), "heads");
    EXPECT_EQ(nearest_name("lay", names), "layers");  // the beginning of a name counts, although "lr" takes
                                                      // fewer letters
    EXPECT_EQ(nearest_name("lr-sched", names), "lr-schedule");
    EXPECT_EQ(nearest_name("sched", names), "lr-schedule");  // within a name
    EXPECT_EQ(nearest_name("Lr_Schedule", names), "lr-schedule");
    EXPECT_EQ(nearest_name("", names), "");
    EXPECT_EQ(nearest_name("np", names), "");
    EXPECT_EQ(nearest_name("epochs", names), "");
    EXPECT_EQ(nearest_name("lr", {}), "");
}

TEST(Text, OneLine) { EXPECT_EQ(one_line("a\nb\r\tc\x1b[1m\xc3\xa9"), "a b  c [1m\xc3\xa9"); }

TEST(Text, Seconds) {
    EXPECT_EQ(human_seconds(0), "0.00 s");
    EXPECT_EQ(human_seconds(123.4), "123 s");
    EXPECT_EQ(human_seconds(12.34), "12.3 s");
    EXPECT_EQ(human_seconds(1.25e-3), "1.25 ms");
    EXPECT_EQ(human_seconds(37.5e-6), "37.5 us");
    EXPECT_EQ(human_seconds(-2e-9), "-2.00 ns");
    EXPECT_EQ(human_seconds(1e-12), "0.00 ns");
}

}  // namespace
}  // namespace llmc
