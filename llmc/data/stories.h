// The embedded corpus: children's stories made by a small grammar, so that training needs no download, and
// the entropy of the text is known exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmc {

// The corpus is the same for all runs, whatever their --seed.
inline constexpr std::uint64_t embedded_stories_seed = 1;
inline constexpr std::size_t embedded_stories_bytes = 2'000'000;

// Stories one after another, the last one cut where the text is long enough: exactly `bytes` bytes of ASCII,
// a pure function of the seed and the size. (A longer text of the same seed begins with a shorter one.)
class Stories {
  public:
    Stories(std::uint64_t seed, std::size_t bytes);

    const std::string& text() const { return text_; }

    // The negative log probability of the bytes [begin, end) under the generator, in nats per byte: minus the
    // sum of ln p over the choices that take effect there, divided by end - begin. It is the loss of a model
    // that knows the grammar and remembers all of the text before: no model does better but by chance.
    //
    // A choice takes effect at the first byte told after it is made, and counts there as a whole. So where a
    // range begins or ends inside a word (the cut at 90%, the cut last story), the sum differs from the
    // range's own -ln p by part of one such choice: a few nats in all, not a few per byte.
    double entropy(std::size_t begin, std::size_t end) const;

  private:
    class RandomChooser;
    // The nats of all choices that take effect up to and at this byte.
    struct Mark {
        std::size_t byte;
        double nats;
    };

    double nats_before(std::size_t byte) const;

    std::string text_;
    std::vector<Mark> marks_;
};

}  // namespace llmc
