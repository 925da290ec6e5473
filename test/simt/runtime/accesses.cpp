#include "simt/runtime/accesses.h"

#include <algorithm>

#include "simt/runtime/memory.h"

namespace simt::runtime {

void join(Clock& clock, const Clock& other) {
    clock.resize(std::max(clock.size(), other.size()));
    for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

std::uint64_t time_of(const Clock& clock, unsigned stream) {
    return stream < clock.size() ? clock[stream] : 0;
}

void Accesses::add(const Access& access, const std::string& what, unsigned stream, std::uint64_t number,
                   const Clock& before) {
    if (access.bytes == 0) return;
    const char* const begin = static_cast<const char*>(access.begin);
    const Entry added{begin, begin + access.bytes, access.writes, stream, number, what};
    for (const Entry& old : entries_) {
        const bool conflicts = (old.writes || added.writes) && old.begin < added.end && added.begin < old.end;
        if (!conflicts || old.stream == stream || old.number <= time_of(before, old.stream)) continue;
        stop(what + " in stream " + std::to_string(stream) + (added.writes ? " writes" : " reads") +
             " memory that " + old.what + " in stream " + std::to_string(old.stream) +
             (old.writes ? " writes" : " reads") + ", and no event orders one after the other");
    }
    // A later access that conflicts with an old one also conflicts with the new one that covers it and is
    // ordered after it.
    std::erase_if(entries_, [&](const Entry& old) {
        return added.begin <= old.begin && old.end <= added.end &&
               (added.writes || (!old.writes && old.stream == stream));
    });
    entries_.push_back(added);
}

void Accesses::forget_before(const Clock& clock) {
    std::erase_if(entries_, [&](const Entry& e) { return e.number <= time_of(clock, e.stream); });
}

void Accesses::forget(const void* begin, std::size_t bytes) {
    const char* const first = static_cast<const char*>(begin);
    std::erase_if(entries_, [&](const Entry& e) { return first <= e.begin && e.end <= first + bytes; });
}

const std::string* Accesses::unfinished(const void* begin, std::size_t bytes, const Clock& done) const {
    const char* const first = static_cast<const char*>(begin);
    for (const Entry& e : entries_) {
        if (e.begin < first + bytes && first < e.end && e.number > time_of(done, e.stream)) return &e.what;
    }
    return nullptr;
}

}  // namespace simt::runtime
