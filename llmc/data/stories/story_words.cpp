#include "llmc/data/stories/story_words.h"

#include <algorithm>
#include <array>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {
namespace {

using enum Pronoun;

constexpr std::array names = std::to_array<StoryWord>({{"Anna", she},
                                                       {"Ella", she},
                                                       {"Emma", she},
                                                       {"Lily", she},
                                                       {"Mia", she},
                                                       {"Molly", she},
                                                       {"Nora", she},
                                                       {"Rosie", she},
                                                       {"Ben", he},
                                                       {"Jack", he},
                                                       {"Leo", he},
                                                       {"Max", he},
                                                       {"Oscar", he},
                                                       {"Peter", he},
                                                       {"Sam", he},
                                                       {"Tom", he}});

constexpr std::array relatives =
    std::to_array<StoryWord>({{"grandmother", she}, {"grandfather", he}, {"aunt", she}, {"uncle", he}});

constexpr std::array kinds =
    std::to_array<StoryWord>({{"brave"}, {"clever"}, {"curious"}, {"gentle"}, {"kind"}, {"quiet"}});

constexpr std::array homes = std::to_array<StoryWord>({{"above the bakery"},
                                                       {"at the edge of the woods"},
                                                       {"at the end of a long road"},
                                                       {"in a little house by the sea"},
                                                       {"in a white house on a hill"},
                                                       {"on a small farm"}});

constexpr std::array days = std::to_array<StoryWord>({{"After breakfast"},
                                                      {"Early one morning"},
                                                      {"Last Sunday"},
                                                      {"One Saturday"},
                                                      {"One quiet afternoon"},
                                                      {"One sunny morning"},
                                                      {"One windy day"}});

constexpr std::array colours = std::to_array<StoryWord>(
    {{"blue"}, {"golden"}, {"green"}, {"pink"}, {"red"}, {"silver"}, {"white"}, {"yellow"}});

constexpr std::array animals = std::to_array<StoryWord>({{"cat"},
                                                         {"duck"},
                                                         {"fox"},
                                                         {"frog"},
                                                         {"goat"},
                                                         {"goose"},
                                                         {"hedgehog"},
                                                         {"hen"},
                                                         {"mouse"},
                                                         {"owl"},
                                                         {"rabbit"},
                                                         {"squirrel"}});

constexpr std::array visitors =
    std::to_array<StoryWord>({{"kitten"}, {"hedgehog"}, {"mouse"}, {"rabbit"}, {"squirrel"}});

constexpr std::array things = std::to_array<StoryWord>({{"ball"},
                                                        {"balloon"},
                                                        {"bell"},
                                                        {"drum"},
                                                        {"hat"},
                                                        {"kite"},
                                                        {"lantern"},
                                                        {"paper boat"},
                                                        {"scarf"},
                                                        {"umbrella"}});

constexpr std::array places = std::to_array<StoryWord>({{"the bridge"},
                                                        {"the castle"},
                                                        {"the meadow"},
                                                        {"the old barn"},
                                                        {"the old mill"},
                                                        {"the pond"},
                                                        {"the river"},
                                                        {"the wishing well"}});

constexpr std::array spots = std::to_array<StoryWord>({{"behind a big stone"},
                                                       {"beside the stream"},
                                                       {"in a hollow log"},
                                                       {"in the tall grass"},
                                                       {"inside an empty barrel"},
                                                       {"under a bench"},
                                                       {"under a blackberry bush"},
                                                       {"under a heap of leaves"}});

constexpr std::array foods =
    std::to_array<StoryWord>({{"apple"}, {"cherry"}, {"cookie"}, {"muffin"}, {"peach"}, {"pear"}, {"plum"}});

constexpr std::array finds =
    std::to_array<StoryWord>({{"acorn"}, {"button"}, {"feather"}, {"marble"}, {"pebble"}, {"shell"}});

constexpr std::array boxes = std::to_array<StoryWord>({{"bag"}, {"box"}, {"jar"}});

constexpr std::array treats =
    std::to_array<StoryWord>({{"bag of nuts"}, {"bar of chocolate"}, {"honey cake"}, {"lemon cake"}});

constexpr std::array sellers =
    std::to_array<StoryWord>({{"farmer", he}, {"old man", he}, {"old woman", she}, {"toymaker", he}});

constexpr std::array boats =
    std::to_array<StoryWord>({{"the Evening Star"}, {"the Lucky Duck"}, {"the White Swan"}});

constexpr std::array sights = std::to_array<StoryWord>({{"a field of sunflowers"},
                                                        {"a heron on one leg"},
                                                        {"a mill with a turning wheel"},
                                                        {"a very old castle"},
                                                        {"an apple tree full of birds"},
                                                        {"an island full of geese"},
                                                        {"three sleeping cows"},
                                                        {"two white horses"}});

constexpr std::array parts = std::to_array<StoryWord>(
    {{"a bathtub"}, {"a ladder"}, {"an old stove"}, {"an umbrella"}, {"two chairs"}});

constexpr std::array skies = std::to_array<StoryWord>({{"a cloud like a sheep"},
                                                       {"a lost balloon"},
                                                       {"a shooting star"},
                                                       {"the evening star"},
                                                       {"the moon"},
                                                       {"the top of a rainbow"}});

constexpr std::array flowers = std::to_array<StoryWord>({{"daisy"}, {"poppy"}, {"rose"}, {"tulip"}});

constexpr std::array vegetables = std::to_array<StoryWord>({{"carrot"}, {"onion"}, {"radish"}, {"turnip"}});

constexpr std::array sizes =
    std::to_array<StoryWord>({{"a barrel"}, {"a bear"}, {"a cow"}, {"a haystack"}, {"a wagon"}});

constexpr std::array noises =
    std::to_array<StoryWord>({{"knock, knock, knock"}, {"scratch, scratch, scratch"}, {"tap, tap, tap"}});

constexpr std::array openings = std::to_array<StoryWord>({{"back door"}, {"front door"}, {"window"}});

constexpr std::array beds = std::to_array<StoryWord>(
    {{"beside the stove"}, {"in a basket"}, {"at the foot of the bed"}, {"under a warm blanket"}});

constexpr std::array goals =
    std::to_array<StoryWord>({{"fifteen"}, {"fifty"}, {"ten"}, {"thirty"}, {"twenty"}});

constexpr std::array lists = std::to_array<std::pair<std::string_view, std::span<const StoryWord>>>(
    {{"name", names},   {"relative", relatives}, {"kind", kinds},       {"home", homes},
     {"day", days},     {"colour", colours},     {"animal", animals},   {"visitor", visitors},
     {"thing", things}, {"place", places},       {"spot", spots},       {"food", foods},
     {"find", finds},   {"box", boxes},          {"treat", treats},     {"seller", sellers},
     {"boat", boats},   {"sight", sights},       {"flower", flowers},   {"vegetable", vegetables},
     {"size", sizes},   {"noise", noises},       {"opening", openings}, {"bed", beds},
     {"goal", goals},   {"part", parts},         {"sky", skies}});

constexpr std::array<std::string_view, 21> numbers = {
    "zero",     "one",     "two",     "three",     "four",     "five",     "six",
    "seven",    "eight",   "nine",    "ten",       "eleven",   "twelve",   "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"};

}  // namespace

std::span<const StoryWord> story_words(std::string_view role) {
    for (const auto& [name, words] : lists) {
        if (name == role) return words;
    }
    programming_error(fmt::format("the stories have no words for '{}'", role));
}

std::string_view number_word(int number) {
    check(number >= 0 && number < static_cast<int>(numbers.size()),
          "the stories have a word for this number");
    return numbers[static_cast<std::size_t>(number)];
}

int number_of_word(std::string_view word) {
    const auto found = std::find(numbers.begin(), numbers.end(), word);
    check(found != numbers.end(), "the word of a number");
    return static_cast<int>(found - numbers.begin());
}

std::string plural_of(std::string_view word) {
    constexpr std::string_view vowels = "aeiou";
    std::string text(word);
    if (word.ends_with('y') && vowels.find(word[word.size() - 2]) == vowels.npos) {
        text.pop_back();
        return text + "ies";
    }
    if (word.ends_with("ch") || word.ends_with("sh") || word.ends_with('s') || word.ends_with('x'))
        return text + "es";
    return text + "s";
}

}  // namespace llmc
