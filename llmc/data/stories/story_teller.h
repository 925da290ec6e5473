// Tells sentences that have slots, and remembers what it has told.
//
// A slot's word is chosen when the slot is first told, from the words of its list that no other slot of the
// story holds. It then stays the same to the story's end. {animal} and {animal2} are two slots of the list
// "animal". A # stands for the number of the current round: {animal#} is {animal} in round 1 and {animal2} in
// round 2.
//
//   {thing}    kite      {a thing}     a kite, an umbrella
//   {Thing}    Kite      {A thing}     A kite, An umbrella
//   {thing:s}  kites     {seller:he}   he, she or it; also :him and :his, :child (girl, boy), :sibling
//   {he2}      the same as {name2:he}; also him and his; {He2} and so on begin a sentence
//   `          a quotation mark
#pragma once

#include <cstddef>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/data/stories/story_words.h"

namespace llmc {

// Makes the choices of a story and receives its text, piece by piece, in order. Each choice is requested
// immediately before the text that it determines.
class Chooser {
  public:
    virtual ~Chooser() = default;
    // One of 0 ... n-1, all equally likely; n is at least 2.
    virtual std::size_t choose(std::size_t n) = 0;
    virtual void write(std::string_view text) = 0;
};

class StoryTeller {
  public:
    explicit StoryTeller(Chooser& chooser) : chooser_(chooser) {}

    // Tells one of the variants, which are literals. Prefers variants that this story has not told yet.
    // Writes a space first, except at the beginning of a paragraph.
    void tell(std::initializer_list<std::string_view> variants);
    // Tells one of the variants or nothing, all equally likely.
    void perhaps_tell(std::initializer_list<std::string_view> variants);
    void end_paragraph();
    void end_story();
    // One of 0 ... n-1, which must change the text that follows. If n is 1, no choice is made.
    std::size_t choose(std::size_t n) { return n == 1 ? 0 : chooser_.choose(n); }

    // The slot will be chosen from these words; its earlier value is forgotten.
    void offer(std::string_view slot, std::vector<std::string> words);
    // The slot will be a number from low to high.
    void offer_number(std::string_view slot, int low, int high);
    void remember(std::string_view slot, std::string text);
    void remember_number(std::string_view slot, int number);

    // The value of a slot that has been told or remembered: its word, the word's index in its list, and the
    // value of a word that is a number.
    std::string text(std::string_view slot) const { return known(slot).text; }
    std::size_t index(std::string_view slot) const { return known(slot).index; }
    int number(std::string_view slot) const { return number_of_word(known(slot).text); }

    void begin_round(int round);  // 1 to 9

  private:
    struct Held {
        std::string text;
        Pronoun pronoun = Pronoun::it;
        std::size_t index = 0;
    };

    std::vector<std::string_view> fresh(std::initializer_list<std::string_view> variants) const;
    std::string slot_name(std::string_view slot) const;
    const Held& known(std::string_view slot) const;
    const Held& hold(const std::string& slot);
    Held draw(const std::string& slot);
    std::string fill(std::string_view slot);
    void write_sentence(std::string_view sentence);

    Chooser& chooser_;
    std::map<std::string, Held> held_;
    std::map<std::string, std::vector<std::string>> offers_;
    std::set<std::string_view> told_;
    bool paragraph_begins_ = true;
    std::string round_;
};

}  // namespace llmc
