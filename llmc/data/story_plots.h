// The plots of the embedded stories. Each is a function that reads as the story does, from top to bottom.
//
// What keeps the grammar unambiguous: the variants of a sentence differ in their own words, every choose()
// changes the next words told, and nothing is chosen that is not told.
#pragma once

#include <string>

#include "llmc/data/story_teller.h"

namespace llmc {

// Stories of things (story_plots_things.cpp).
void lost_and_found(StoryTeller& s);  // its colour, the place, who knew where it was
void basket(StoryTeller& s);          // counting down; the guests
void collection(StoryTeller& s);      // sums; one lost and found again
void present(StoryTeller& s);         // the right colour; what is left of the coins
void letters(StoryTeller& s);         // which colour is for whom
void seed(StoryTeller& s);            // counting days; the place it came from

// Stories of places (story_plots_places.cpp).
void hide_and_seek(StoryTeller& s);  // who hid where, who was found first
void voyage(StoryTeller& s);         // three sights told forwards and backwards
void night_visit(StoryTeller& s);    // a sound, a light and a visitor
void harvest(StoryTeller& s);        // a chain that grows by one helper at a time
void rocket(StoryTeller& s);         // a countdown there and back

// How several of them begin.
void introduce(StoryTeller& s);

// "the owl, the fox and the hen": what the slots `list`, `list`2, ... hold.
std::string the_ones(const StoryTeller& s, const std::string& list, int count);

}  // namespace llmc
