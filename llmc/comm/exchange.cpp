#include "llmc/comm/exchange.h"

#include <algorithm>
#include <thread>

namespace llmc {
namespace {

// A waiting rank first yields its core at every poll, which gives the fastest response. Later it sleeps
// between polls, so that it does not slow ranks that share the core.
constexpr Seconds yield_time{1e-3};
constexpr std::chrono::microseconds nap{50};

}  // namespace

void Exchange::begin(int tag, std::string_view call) {
    in_flight_->begin(tag, call);
    messages_.clear();
    bytes_sent_ = 0;
    watchdog_.begin(call, options_.advice);
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
                  [&](std::size_t first, std::size_t part) { in_flight_->send(to, data + first, part); });
    bytes_sent_ += bytes;
}

void Exchange::recv(int from, std::byte* data, std::size_t bytes) {
    post_in_parts(bytes, {from, true},
                  [&](std::size_t first, std::size_t part) { in_flight_->recv(from, data + first, part); });
}

void Exchange::wait() {
    while (!is_done()) {
        if (watchdog_.waited() < yield_time) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(nap);
        }
    }
}

bool Exchange::is_done() {
    const bool moved = in_flight_->open() > 0 && in_flight_->poll();
    if (in_flight_->open() == 0) {
        watchdog_.end();
        return true;
    }
    watchdog_.look(moved, [this] { return awaited(); });
    return false;
}

// The ranks whose messages are missing. If no receive is open, the ranks that have not taken a message.
std::vector<int> Exchange::awaited() const {
    std::vector<int> senders;
    std::vector<int> receivers;
    for (std::size_t i = 0; i < messages_.size(); ++i)
        if (!in_flight_->is_done(i))
            (messages_[i].receives ? senders : receivers).push_back(messages_[i].peer);
    std::vector<int>& ranks = senders.empty() ? receivers : senders;
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

}  // namespace llmc
