// Finds work of two streams that touches the same memory with no event between: by the order that events, waits and the
// host's own waits give, whatever order the work happens to run in. It knows the ranges of copies, memsets, products
// and collectives; what kernels touch it does not know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simt::runtime {

// A moment: of each stream, by its number, how many pieces of its work lie before.
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
    // By the piece of work with this number in its stream; `before`: what is ordered before it. Ends the process
    // where another stream's access is not.
    void add(const Access& access, const std::string& what, unsigned stream, std::uint64_t number,
             const Clock& before);
    // What all later work is ordered after.
    void forget_before(const Clock& clock);
    void forget(const void* begin, std::size_t bytes);
    // The work that touches the range and is not done: `done`, of each stream, how many pieces are. Null: none.
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
