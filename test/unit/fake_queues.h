// A device's queues that only remember what they were given, in the order in which it was given, and say whether one
// thing must be done before another.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "llmc/device/queues.h"

namespace llmc {

class FakeQueues final : public Queues {
  public:
    void select(StreamKind stream) override { selected_ = stream; }
    int new_mark() override { return marks_++; }
    void set(int mark) override { set_at_[mark] = add("set"); }
    void wait(int mark) override {
        const std::size_t here = add("wait");
        // A mark that was never set is reached.
        if (const auto at = set_at_.find(mark); at != set_at_.end()) entries_[here].after = at->second;
    }
    void wait_on_host(int mark) override {
        if (set_at_.contains(mark)) host_waits_.push_back(mark);
    }
    // As if every entry took a millisecond.
    double milliseconds(int from, int to) override {
        double entries = 0;
        for (std::size_t i = set_at_.at(from) + 1; i < set_at_.at(to); ++i)
            entries += entries_[i].what == "work";
        return entries;
    }

    // Work of the selected queue; returns its place.
    std::size_t work() { return add("work"); }
    StreamKind selected() const { return selected_; }
    StreamKind stream_of(std::size_t place) const { return entries_[place].stream; }
    std::size_t host_waits() const { return host_waits_.size(); }

    // Whether all that was given at the first place is done before the second begins, whatever runs when.
    bool is_before(std::size_t first, std::size_t second) const {
        if (first >= second) return first == second;
        // The entry before in the same queue, and what a wait waits for.
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
    int marks_ = 0;
    std::map<int, std::size_t> set_at_;
    std::vector<Entry> entries_;
    std::vector<int> host_waits_;
};

}  // namespace llmc
