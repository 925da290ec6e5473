// The words of the embedded stories, in lists by their role.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace llmc {

enum class Pronoun { it, she, he };

struct StoryWord {
    std::string_view text;
    Pronoun pronoun = Pronoun::it;
};

// The list of words for a role ("animal", "colour", ...); ProgrammingError if there is none.
std::span<const StoryWord> story_words(std::string_view role);

// 0 to 20 in words, and back.
std::string_view number_word(int number);
int number_of_word(std::string_view word);

// "kites", "peaches", "cherries": by the rule, because no counted word of the stories is an exception.
std::string plural_of(std::string_view word);

}  // namespace llmc
