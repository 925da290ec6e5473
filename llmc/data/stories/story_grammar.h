// The interface of the grammar of the embedded stories: one function that tells a story through a Chooser.
//
// The grammar is unambiguous: no two sequences of choices give the same text. Random choices therefore give
// the probability of the text, and the choices behind a text can be found.
#pragma once

#include <cstddef>
#include <string_view>

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

// Tells one story: ASCII, three or four paragraphs of one line each, and an empty line at the end.
void tell_story(Chooser& chooser);

}  // namespace llmc
