// The embedded corpus: children's stories from a small grammar. Training thus needs no download, and the
// entropy of the text is known exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmc {

class Chooser;

// Tells one story through a Chooser (story_teller.h): ASCII, three or four paragraphs of one line each, and
// an empty line at the end.
//
// The grammar is unambiguous: no two sequences of choices give the same text. Random choices therefore give
// the probability of the text, and the choices behind a text can be found.
void tell_story(Chooser& chooser);

// The corpus is the same for all runs, for any --seed.
inline constexpr std::uint64_t embedded_stories_seed = 1;
inline constexpr std::size_t embedded_stories_bytes = 2'000'000;

// Stories one after another, cut to exactly `bytes` bytes of ASCII: a pure function of the seed and the size.
// (A longer text of the same seed begins with the shorter one.)
class Stories {
  public:
    Stories(std::uint64_t seed, std::size_t bytes);

    const std::string& text() const { return text_; }

    // The negative log probability of the bytes [begin, end) under the generator, in nats per byte: minus the
    // sum of ln p over the choices that take effect there, divided by end - begin. This is the loss of a
    // model that knows the grammar and all of the text before; a lower loss is possible only by chance.
    //
    // A choice takes effect, as a whole, at the first byte that is written after it. If a range begins or
    // ends inside a word (the cut at 90%, the cut last story), the sum differs from the range's own -ln p by
    // part of one such choice. That is a few nats in all, not a few per byte.
    double entropy(std::size_t begin, std::size_t end) const;

  private:
    class RandomChooser;
    // The sum of the nats of all choices that take effect up to and including this byte.
    struct Mark {
        std::size_t byte;
        double nats;
    };

    double nats_before(std::size_t byte) const;

    std::string text_;
    std::vector<Mark> marks_;
};

}  // namespace llmc
