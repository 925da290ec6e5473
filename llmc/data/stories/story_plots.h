// The plots of the embedded stories. Each is a function that reads as the story does, from top to bottom.
//
// Three rules keep the grammar unambiguous. The variants of a sentence differ in their own words, every
// choose() changes the next words told, and every choice appears in the text.
#pragma once

#include <string>

#include "llmc/data/stories/story_teller.h"

namespace llmc {

// Stories about things (story_plots_things.cpp). The comments name what a model must
// remember to predict the text.
void lost_and_found(StoryTeller& s);  // Its colour, the place, who knew where it was.
void basket(StoryTeller& s);          // Counting down; the guests.
void collection(StoryTeller& s);      // Sums; one lost and found again.
void present(StoryTeller& s);         // The right colour; what is left of the coins.
void letters(StoryTeller& s);         // Which colour is for whom.
void seed(StoryTeller& s);            // Counting days; the place it came from.

// Stories about places (story_plots_places.cpp).
void hide_and_seek(StoryTeller& s);  // Who hid where, who was found first.
void voyage(StoryTeller& s);         // Three sights told forwards and backwards.
void night_visit(StoryTeller& s);    // A sound, a light and a visitor.
void harvest(StoryTeller& s);        // A chain that grows by one helper at a time.
void rocket(StoryTeller& s);         // A countdown there and back.

// The beginning of several stories.
void introduce(StoryTeller& s);

// "the owl, the fox and the hen": the values of the slots `list`, `list`2, ...
std::string the_ones(const StoryTeller& s, const std::string& list, int count);

}  // namespace llmc
