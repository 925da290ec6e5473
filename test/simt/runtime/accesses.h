// Finds work of two streams that touches the same memory without an event in between. It uses the order that
// events, waits and the host's own waits give, not the order in which the work happens to run. It knows the
// memory ranges of copies, memsets, products and collectives, but not those of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simt::runtime {

// A moment: for each stream, by its number, how many pieces of its work come before.
using Clock = std::vector<std::uint64_t>;
void join(Clock& clock, const Clock& other);
std::uint64_t time_of(const Clock& clock, unsigned stream);

struct Access {
    const void* begin;
    std::size_t bytes;
    bool writes;
};
inline Access reads(const void* begin, std::size_t bytes) { return {begin, bytes, false}; }
inline Access writes(const void* begin, std::size_t bytes) { return {begin, bytes, true}; }

class Accesses {
  public:
    // Adds an access by the piece of work with this number in its stream. `before` is the work that is
    // ordered before it. Ends the process if a conflicting access of another stream is not ordered before it.
    void add(const Access& access, const std::string& what, unsigned stream, std::uint64_t number,
             const Clock& before);
    // Forgets the accesses before this moment, because all later work is ordered after it.
    void forget_before(const Clock& clock);
    void forget(const void* begin, std::size_t bytes);
    // Work that touches the range and is not done, or null. `done` is the number of finished pieces of each
    // stream.
    const std::string* unfinished(const void* begin, std::size_t bytes, const Clock& done) const;

  private:
    struct Entry {
        const char *begin, *end;
        bool writes;
        unsigned stream;
        std::uint64_t number;
        std::string what;
    };
    std::vector<Entry> entries_;
};

}  // namespace simt::runtime
