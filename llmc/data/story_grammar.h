// The grammar of the embedded stories, seen from outside: one function that tells a story through a Chooser.
//
// The grammar is unambiguous: no two sequences of choices tell the same text. So whoever makes the choices at
// random knows the probability of what is told, and whoever has a text can find the choices behind it.
#pragma once

#include <cstddef>
#include <string_view>

namespace llmc {

// Makes the choices of a story and receives its text, piece by piece, in order. A choice is asked for right
// before the text that it chooses.
class Chooser {
  public:
    virtual ~Chooser() = default;
    // One of 0 ... n-1, all equally likely; n is at least 2.
    virtual std::size_t choose(std::size_t n) = 0;
    virtual void write(std::string_view text) = 0;
};

// One story: ASCII, three or four paragraphs of one line each, and an empty line at the end.
void tell_story(Chooser& chooser);

}  // namespace llmc
