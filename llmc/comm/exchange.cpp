#include "llmc/comm/exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <thread>

#include "llmc/core/error.h"

namespace llmc {
namespace {

using Clock = std::chrono::steady_clock;

// A waiting rank first yields its core at every poll, which answers fastest, then naps, so that ranks that
// share the core with it are not slowed by its polling.
constexpr Seconds yield_time{1e-3};
constexpr std::chrono::microseconds nap{50};

// A poll that comes late counts for no more than this: a job that was stopped and continued as a whole has
// not waited for anyone.
constexpr Seconds longest_counted_pause{1.0};

// Turns to speak: their seconds, and after how many ranks the first one's comes again.
constexpr double turn = 0.2;
constexpr int most_turns = 16;

std::string listed(std::span<const int> ranks) {
    constexpr std::size_t most = 8;
    std::string text;
    for (const int rank : ranks.first(std::min(most, ranks.size())))
        text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
    if (ranks.size() > most) text += fmt::format(" and {} more", ranks.size() - most);
    return text;
}

}  // namespace

bool is_turn_to_speak(int rank, int size, double overdue, double clock) {
    const int turns = std::min(size, most_turns);
    const int earlier_ranks = rank / most_turns * most_turns;
    const double now = clock / turn;
    const bool own = static_cast<std::int64_t>(std::floor(now)) % turns == rank % turns;
    // Only in the first half: the second separates this turn from the next rank's.
    return overdue >= earlier_ranks * turn && own && now - std::floor(now) < 0.5;
}

void Exchange::begin(int tag, std::string_view call) {
    under_way_->begin(tag, call);
    messages_.clear();
    call_ = call;
    bytes_sent_ = 0;
    waited_ = Seconds{0};
    last_look_ = Clock::now();
    told_ = false;
}

template <class Post>
void Exchange::post_in_parts(std::size_t bytes, const Message& message, const Post& post) {
    std::size_t first = 0;
    do {
        const std::size_t part = std::min(bytes - first, options_.largest_message);
        post(first, part);
        messages_.push_back(message);
        first += part;
    } while (first < bytes);
}

void Exchange::send(int to, const std::byte* data, std::size_t bytes) {
    post_in_parts(bytes, {to, false},
                  [&](std::size_t first, std::size_t part) { under_way_->send(to, data + first, part); });
    bytes_sent_ += bytes;
}

void Exchange::recv(int from, std::byte* data, std::size_t bytes) {
    post_in_parts(bytes, {from, true},
                  [&](std::size_t first, std::size_t part) { under_way_->recv(from, data + first, part); });
}

void Exchange::wait() {
    while (!is_done()) {
        if (waited_ < yield_time) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(nap);
        }
    }
}

bool Exchange::is_done() {
    if (under_way_->open() == 0) return true;
    const bool moved = under_way_->poll();
    if (under_way_->open() == 0) return true;
    const Clock::time_point now = Clock::now();
    waited_ = moved ? Seconds{0} : waited_ + std::min(Seconds(now - last_look_), longest_counted_pause);
    last_look_ = now;
    watch(waited_);
    return false;
}

void Exchange::watch(Seconds waited) {
    // Ranks in a chain of waiting are not the one that is stuck: so that none of them is named, a rank that has
    // waited for long tells all others once.
    if (!told_ && waited > options_.timeout / 2) {
        transport_.tell_waiting();
        told_ = true;
    }
    if (waited <= options_.timeout) return;
    const double overdue = (waited - options_.timeout).count();
    const Seconds clock = std::chrono::system_clock::now().time_since_epoch();
    if (!is_turn_to_speak(transport_.rank(), transport_.size(), overdue, clock.count())) return;
    const std::vector<int> ranks = awaited();
    std::vector<int> silent = ranks;
    std::erase_if(silent, [&](int rank) { return transport_.has_told_waiting(rank); });
    if (!silent.empty()) report(silent, silent.size() == 1 ? "does not answer" : "do not answer");
    // Those waited for are waiting as well, so it is for others to speak. Where none of them has done so when
    // the last rank has had its turn, all wait for each other.
    const double all_turns = (transport_.size() + most_turns) * turn;
    if (overdue > all_turns + 1) report(ranks, ranks.size() == 1 ? "waits too" : "wait too");
}

// The ranks whose messages are missing, or where there are none, those that take none.
std::vector<int> Exchange::awaited() const {
    std::vector<int> senders;
    std::vector<int> receivers;
    for (std::size_t i = 0; i < messages_.size(); ++i)
        if (!under_way_->is_done(i))
            (messages_[i].receives ? senders : receivers).push_back(messages_[i].peer);
    std::vector<int>& ranks = senders.empty() ? receivers : senders;
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

void Exchange::report(const std::vector<int>& ranks, std::string_view what_they_do) const {
    abort_job(transport_, fmt::format("error: rank {} waited {} s in {} for {} {}, which {}; the job ends",
                                      transport_.rank(), options_.timeout.count(), call_,
                                      ranks.size() == 1 ? "rank" : "ranks", listed(ranks), what_they_do));
}

}  // namespace llmc
