// The embedded stories: they are always the same, have exactly one derivation, have the entropy of their
// choices, and are consistent and in correct English.
#include "llmc/data/stories/stories.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/data/stories/story_teller.h"

// With -fsanitize=address, g++ 12 warns that members of <regex>'s own objects are uninitialised (GCC bug
// 105562).
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <regex>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

namespace llmc {
namespace {

const Stories& embedded() {
    static const Stories stories(embedded_stories_seed, embedded_stories_bytes);
    return stories;
}

struct Piece {
    std::size_t begin;
    std::string_view text;  // with the empty line at its end
};

// The first stories of the text, split at the empty lines between them.
std::vector<Piece> first_stories(const Stories& stories, std::size_t count) {
    const std::string_view text = stories.text();
    std::vector<Piece> pieces;
    std::size_t begin = 0;
    while (pieces.size() < count) {
        const std::size_t end = text.find("\n\n", begin);
        if (end == text.npos) break;  // the last story is cut
        pieces.push_back({begin, text.substr(begin, end + 2 - begin)});
        begin = end + 2;
    }
    return pieces;
}

std::vector<std::string> words_of(std::string_view text) {
    std::vector<std::string> words(1);
    for (const char c : text) {
        if (std::isalpha(static_cast<unsigned char>(c)) != 0) {
            words.back() += c;
        } else if (!words.back().empty()) {
            words.emplace_back();
        }
    }
    return words;
}

// ---- A parser: the grammar itself, controlled by a text -----------------------------------------------

// Tells a story with given choices and compares it with a text. If the choices run out, it asks for one more.
// If the text differs, it stops.
class Replay final : public Chooser {
  public:
    struct MoreChoices {
        std::size_t n;
    };
    struct OtherText {};

    Replay(std::string_view text, const std::vector<std::size_t>& choices)
        : text_(text), choices_(choices), nats_(text.size()) {}

    std::size_t choose(std::size_t n) override {
        if (made_ == choices_.size()) throw MoreChoices{n};
        nats_.at(told_) += std::log(static_cast<double>(n));
        return choices_[made_++];
    }
    void write(std::string_view text) override {
        if (!text_.substr(told_).starts_with(text)) throw OtherText{};
        told_ += text.size();
    }

    bool whole() const { return told_ == text_.size() && made_ == choices_.size(); }
    // For each byte of the text, -ln p of the choices made right before it.
    const std::vector<double>& nats() const { return nats_; }

  private:
    std::string_view text_;
    const std::vector<std::size_t>& choices_;
    std::size_t told_ = 0;
    std::size_t made_ = 0;
    std::vector<double> nats_;
};

// Finds every sequence of choices that begins with `choices` and tells the text. Collects the nats of each.
void find_derivations(std::string_view text, std::vector<std::size_t>& choices,
                      std::vector<std::vector<double>>& nats) {
    Replay replay(text, choices);
    std::size_t n = 0;
    try {
        tell_story(replay);
        if (replay.whole()) nats.push_back(replay.nats());
        return;
    } catch (const Replay::OtherText&) {
        return;
    } catch (const Replay::MoreChoices& more) {
        n = more.n;
    }
    choices.push_back(0);
    for (std::size_t choice = 0; choice < n; ++choice) {
        choices.back() = choice;
        find_derivations(text, choices, nats);
    }
    choices.pop_back();
}

TEST(Stories, HaveExactlyOneDerivationWithTheRecordedEntropy) {
    // The recorded value is a difference of sums of up to 1e4 nats. With fewer than 2e4 terms, each sum is
    // exact to 2e4 * 1e4 * 2^-53 = 2e-8.
    constexpr double tolerance = 5e-8;
    double sum = 0;
    for (const auto& [begin, text] : first_stories(embedded(), 300)) {
        std::vector<std::size_t> choices;
        std::vector<std::vector<double>> derivations;
        find_derivations(text, choices, derivations);
        ASSERT_EQ(derivations.size(), 1U) << text;
        for (std::size_t i = 0; i < text.size(); ++i) {
            ASSERT_NEAR(embedded().entropy(begin + i, begin + i + 1), derivations[0][i], tolerance)
                << text.substr(0, i);
        }
        sum += std::accumulate(derivations[0].begin(), derivations[0].end(), 0.0);
        const std::size_t end = begin + text.size();
        EXPECT_NEAR(embedded().entropy(0, end) * static_cast<double>(end), sum, tolerance) << text;
    }
}

// ---- The same text for every caller -------------------------------------------------------------------

TEST(Stories, AreAPureFunctionOfTheSeed) {
    const std::string& text = embedded().text();
    ASSERT_EQ(text.size(), 2'000'000U);
    EXPECT_EQ(XXH64(text.data(), text.size(), 0), 957952446196937641ULL);
    EXPECT_EQ(Stories(embedded_stories_seed, 10'000).text(), text.substr(0, 10'000));
    EXPECT_NE(Stories(embedded_stories_seed + 1, 10'000).text(), text.substr(0, 10'000));
}

TEST(Stories, ACutTextHasTheEntropyOfItsPart) {
    const Stories& whole = embedded();
    for (const std::size_t bytes : {1UL, 100UL, 5'000UL, 12'345UL}) {
        EXPECT_EQ(Stories(embedded_stories_seed, bytes).entropy(0, bytes), whole.entropy(0, bytes));
    }
    // The first choice affects the first byte, and the parts add up to the whole.
    EXPECT_GE(whole.entropy(0, 1), std::log(2));
    const double parts = 1.8e6 * whole.entropy(0, 1'800'000) + 0.2e6 * whole.entropy(1'800'000, 2'000'000);
    EXPECT_NEAR(parts, 2e6 * whole.entropy(0, 2'000'000), 1e-6);
}

// The corpus is worth learning. Its letters' frequencies predict it badly (about 3 nats), but a reader who
// remembers the story can predict almost every letter.
TEST(Stories, HaveLittleEntropy) {
    EXPECT_GT(embedded().entropy(0, 2'000'000), 0.03);
    EXPECT_LT(embedded().entropy(0, 2'000'000), 0.10);
    // A story's nats differ from the mean for its length by a standard deviation of 5.7. Over the 340 stories
    // and 200,000 bytes of the last tenth, that is 5.7 sqrt(340) / 200,000 = 0.0005 nats per byte. The
    // tolerance is six of these.
    EXPECT_NEAR(embedded().entropy(1'800'000, 2'000'000), embedded().entropy(0, 1'800'000), 0.003);
}

// ---- Facts that a reader must remember -----------------------------------------------------------------

std::vector<std::string> some_stories() {
    std::vector<std::string> stories;
    for (const Piece& piece : first_stories(embedded(), 1000)) stories.emplace_back(piece.text);
    return stories;
}

using Groups = std::vector<std::string>;

// The groups of every match.
std::vector<Groups> matches(const std::string& text, const std::string& pattern) {
    const std::regex regex(pattern);
    std::vector<Groups> found;
    for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
        found.emplace_back();
        for (std::size_t group = 1; group < match->size(); ++group) found.back().push_back(match->str(group));
    }
    return found;
}

int number_in_words(std::string word) {
    constexpr std::array<std::string_view, 11> words = {"zero", "one",   "two",   "three", "four", "five",
                                                        "six",  "seven", "eight", "nine",  "ten"};
    word[0] = static_cast<char>(std::tolower(word[0]));
    const auto found = std::ranges::find(words, word);
    EXPECT_NE(found, words.end()) << word;
    return static_cast<int>(found - words.begin());
}

TEST(Stories, CountTheBasketDown) {
    int baskets = 0;
    for (const std::string& story : some_stories()) {
        const auto told =
            matches(story, "\"(?:There were|I had) (\\w+), but (?:I met )?(the .*?)(?:,\"| were hungry)");
        if (told.empty()) continue;
        ++baskets;
        const auto start = matches(story, "(?:with|put|There were) (\\w+) \\w+s[ .]");
        ASSERT_FALSE(start.empty()) << story;
        EXPECT_EQ(told[0][0], start[0][0]) << story;
        int left = number_in_words(start[0][0]);
        for (const Groups& gift : matches(story, "(?:gave it|It got) (one|two) "))
            left -= number_in_words(gift[0]);
        const auto said = matches(story, "\"(?:Thank you for the |Only )?(\\w+) \\w+s[!?]\"");
        ASSERT_EQ(said.size(), 1U) << story;
        EXPECT_EQ(number_in_words(said[0][0]), left) << story;

        std::string guests;
        const auto met = matches(story, "(?:he met|Soon|A little later) an? (\\w+)");
        for (std::size_t i = 0; i < met.size(); ++i) {
            guests += (i == 0 ? "the " : i + 1 == met.size() ? " and the " : ", the ") + met[i][0];
        }
        EXPECT_EQ(told[0][1], guests) << story;
    }
    EXPECT_GT(baskets, 50);
}

TEST(Stories, BringEachLetterToItsReceiver) {
    int letters = 0;
    for (const std::string& story : some_stories()) {
        std::map<std::string, std::string> colours;
        for (const Groups& match : matches(story, "an? (\\w+) (?:one|letter) for the (\\w+)"))
            colours[match[1]] = match[0];
        if (colours.empty()) continue;
        ++letters;
        EXPECT_EQ(colours.size(), 3U) << story;
        const auto brought = matches(
            story, "the (\\w+) (?:and|was waiting. \\w+ smiled and) (?:gave it|took out) the (\\w+) letter");
        EXPECT_EQ(brought.size(), 3U) << story;
        for (const Groups& match : brought) EXPECT_EQ(colours[match[0]], match[1]) << story;
    }
    EXPECT_GT(letters, 50);
}

TEST(Stories, FindTheThingThatWasLost) {
    int lost = 0;
    for (const std::string& story : some_stories()) {
        const auto asked = matches(story, "(?:seen my|see an?|My) (\\w+) (\\w+(?: boat)?)(?:\\?| is gone)");
        if (asked.empty()) continue;
        ++lost;
        const std::string &colour = asked[0][0], &thing = asked[0][1];
        for (const Groups& match : matches(story, "(\\w+) " + thing + "\\b")) {
            EXPECT_TRUE(match[0] == colour || match[0] == "the" || match[0] == "The")
                << match[0] << ": " << story;
        }
        EXPECT_GE(matches(story, fmt::format("({} {})", colour, thing)).size(), 3U) << story;
        const auto spot =
            matches(story, "\"(?:I saw it|It is|The wind took it,\" said the \\w+. \"Now it lies) (.*?)[.,]");
        ASSERT_EQ(spot.size(), 1U) << story;
        EXPECT_EQ(matches(story, "(" + spot[0][0] + ")").size(), 2U) << story;
    }
    EXPECT_GT(lost, 50);
}

TEST(Stories, CountTheSameBothWays) {
    int rockets = 0, seeds = 0;
    for (const std::string& story : some_stories()) {
        const auto countdowns = matches(story, "\"(\\w+, [a-z, ]+, two, one)!\"");
        if (!countdowns.empty()) {
            ++rockets;
            ASSERT_EQ(countdowns.size(), 2U) << story;
            EXPECT_EQ(countdowns[0], countdowns[1]) << story;
        }
        const auto waited = matches(story, "(?:waited|water and) (\\w+) days");
        if (!waited.empty()) {
            ++seeds;
            const auto passed = matches(story, "(\\w+) days? (?:passed|went by)");
            for (std::size_t i = 0; i < passed.size(); ++i) {
                EXPECT_EQ(number_in_words(passed[i][0]), static_cast<int>(i) + 1) << story;
            }
            EXPECT_EQ(number_in_words(waited[0][0]), static_cast<int>(passed.size())) << story;
        }
    }
    EXPECT_GT(rockets, 50);
    EXPECT_GT(seeds, 50);
}

TEST(Stories, GiveEachNameItsPronouns) {
    std::map<std::string, std::set<std::string>> words;  // the words used for each name
    for (const std::string& story : some_stories()) {
        for (const Groups& match : matches(story, "(girl|boy) named ([A-Z]\\w+)"))
            words[match[1]].insert(match[0]);
        for (const Groups& match : matches(story, "([A-Z]\\w+)(?: was|,) a \\w+ (girl|boy)"))
            words[match[0]].insert(match[1]);
        for (const Groups& match : matches(story, "(sister|brother) ([A-Z]\\w+)")) {
            words[match[1]].insert(match[0] == "sister" ? "girl" : "boy");
        }
        for (const Groups& match : matches(story, "([A-Z]\\w+) (?:closed|picked up) (her|his) ")) {
            words[match[0]].insert(match[1] == "her" ? "girl" : "boy");
        }
    }
    EXPECT_EQ(words.size(), 16U);
    for (const auto& [name, kinds] : words) EXPECT_EQ(kinds.size(), 1U) << name;
}

// ---- English ------------------------------------------------------------------------------------------

TEST(Stories, AreASCIIInParagraphs) {
    const std::string& text = embedded().text();
    EXPECT_TRUE(std::ranges::all_of(text, [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); }));
    for (const std::string_view never :
         {"  ", " \n", "\n ", "\n\n\n", " .", " ,", " !", " ?", "{", "}", "`", "#", "..", ",,"}) {
        EXPECT_EQ(text.find(never), text.npos) << "'" << never << "'";
    }
    std::size_t shortest = text.size(), longest = 0;
    for (const auto& [begin, story] : first_stories(embedded(), text.size())) {
        shortest = std::min(shortest, story.size());
        longest = std::max(longest, story.size());
        const auto lines = std::ranges::count(story, '\n') - 1;
        EXPECT_TRUE(lines >= 3 && lines <= 4) << story;
        EXPECT_EQ(std::ranges::count(story, '"') % 2, 0) << story;
    }
    EXPECT_GT(shortest, 300U);
    EXPECT_LT(longest, 1000U);
}

TEST(Stories, HaveAFewHundredWords) {
    std::set<std::string> words;
    for (std::string word : words_of(embedded().text())) {
        std::ranges::transform(word, word.begin(), [](unsigned char c) { return std::tolower(c); });
        words.insert(word);
    }
    EXPECT_GT(words.size(), 300U);
    EXPECT_LT(words.size(), 700U);
}

TEST(Stories, BeginSentencesWithCapitals) {
    for (const std::string& story : some_stories()) {
        EXPECT_TRUE(std::isupper(static_cast<unsigned char>(story[story[0] == '"' ? 1 : 0])) != 0) << story;
        for (const char* small : {"[.!?] \"?[a-z]", "\\.\" [a-z]", "\n\"?[a-z]"}) {
            EXPECT_FALSE(std::regex_search(story, std::regex(small))) << small << ": " << story;
        }
        EXPECT_TRUE(std::regex_search(story, std::regex("[.!?]\"?\n\n$"))) << story;
    }
}

TEST(Stories, HaveTheRightArticlesAndPlurals) {
    const std::string vowels = "aeiou";
    const std::vector<std::string> words = words_of(embedded().text());
    int an = 0;
    for (std::size_t i = 0; i + 1 < words.size(); ++i) {
        const bool vowel = vowels.find(words[i + 1].empty() ? 'x' : words[i + 1][0]) != vowels.npos;
        if (words[i] == "a" || words[i] == "A") {
            EXPECT_FALSE(vowel) << words[i] << ' ' << words[i + 1];
        }
        if (words[i] == "an" || words[i] == "An") {
            ++an;
            EXPECT_TRUE(vowel) << words[i] << ' ' << words[i + 1];
        }
    }
    EXPECT_GT(an, 1000);

    const std::string things =
        "(?:apple|cherry|cookie|muffin|peach|pear|plum|acorn|button|feather|marble|pebble|shell)";
    for (const std::string& story : some_stories()) {
        EXPECT_TRUE(
            matches(story, "((?:two|three|four|five|six|seven|eight|nine|ten) (?:\\w+ )?" + things + "\\b)")
                .empty())
            << story;
        EXPECT_TRUE(
            matches(story, "(\\bone (?:\\w+ )?(?:apples|cherries|cookies|muffins|peaches|pears|plums))")
                .empty())
            << story;
        EXPECT_EQ(story.find("cherrys"), story.npos);
        EXPECT_EQ(story.find("peachs"), story.npos);
    }
}

}  // namespace
}  // namespace llmc
