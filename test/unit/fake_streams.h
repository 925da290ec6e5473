// A device's streams that only record their entries in order. They say whether one entry must be done before
// another.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "llmc/device/device.h"

namespace llmc {

class FakeStreams final : public Streams {
  public:
    void select(StreamKind stream) override { selected_ = stream; }
    int new_event() override { return events_++; }
    int new_timed_event() override { return events_++; }
    void record(int event) override { set_at_[event] = add("set"); }
    void wait(int event) override {
        const std::size_t here = add("wait");
        // An event that was never set counts as reached.
        if (const auto at = set_at_.find(event); at != set_at_.end()) entries_[here].after = at->second;
    }
    void wait_on_host(int event) override {
        if (set_at_.contains(event)) host_waits_.push_back(event);
    }
    // Every entry takes a millisecond.
    double milliseconds(int from, int to) override {
        double entries = 0;
        for (std::size_t i = set_at_.at(from) + 1; i < set_at_.at(to); ++i)
            entries += entries_[i].what == "work";
        return entries;
    }

    // Adds work to the selected stream; returns its place.
    std::size_t work() { return add("work"); }
    StreamKind selected() const { return selected_; }
    StreamKind stream_of(std::size_t place) const { return entries_[place].stream; }
    std::size_t host_waits() const { return host_waits_.size(); }

    // Whether everything at the first place is done before the second begins, whatever order the streams run
    // in.
    bool is_before(std::size_t first, std::size_t second) const {
        if (first >= second) return first == second;
        // The earlier entries of the same stream, and the entry that a wait waits for.
        for (std::size_t i = second; i-- > 0;) {
            if (entries_[i].stream != entries_[second].stream) continue;
            if (is_before(first, i)) return true;
            break;
        }
        return entries_[second].after != none && is_before(first, entries_[second].after);
    }

  private:
    static constexpr std::size_t none = ~std::size_t{0};
    struct Entry {
        StreamKind stream;
        std::string what;
        std::size_t after = none;
    };
    std::size_t add(const char* what) {
        entries_.push_back({selected_, what});
        return entries_.size() - 1;
    }

    StreamKind selected_ = StreamKind::compute;
    int events_ = 0;
    std::map<int, std::size_t> set_at_;
    std::vector<Entry> entries_;
    std::vector<int> host_waits_;
};

}  // namespace llmc
