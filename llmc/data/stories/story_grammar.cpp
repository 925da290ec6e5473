#include "llmc/data/stories/story_grammar.h"

#include <array>
#include <string>

#include "llmc/data/stories/story_plots.h"
#include "llmc/data/stories/story_teller.h"

namespace llmc {

void introduce(StoryTeller& s) {
    s.tell({"Once upon a time there was {a kind} {name:child} named {name}.",
            "Once there was a {name:child} named {name}, who lived {home}.",
            "{Home} there lived {a kind} {name:child} named {name}.",
            "{Name} was {a kind} {name:child} who lived {home}.",
            "This is the story of {name}, {a kind} {name:child}."});
}

std::string the_ones(const StoryTeller& s, const std::string& list, int count) {
    std::string text = "the " + s.text(list);
    for (int i = 2; i <= count; ++i) {
        text += (i == count ? " and the " : ", the ") + s.text(list + std::to_string(i));
    }
    return text;
}

void tell_story(Chooser& chooser) {
    static constexpr std::array plots = {lost_and_found, basket, collection,  present, letters, seed,
                                         hide_and_seek,  voyage, night_visit, harvest, rocket};
    StoryTeller teller(chooser);
    plots[teller.choose(plots.size())](teller);
    teller.end_story();
}

}  // namespace llmc
