#include "llmc/comm/watchdog.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <thread>

namespace llmc {
namespace {

using Clock = std::chrono::steady_clock;

// The longest pause between two looks that counts as waiting. A job that was stopped and continued as a whole
// has not waited for anyone.
constexpr Seconds longest_counted_pause{1.0};

// Turns to report: the length of a turn in seconds, and the most turns until it is the first rank's turn
// again. Ranks from most_turns on begin `later_turns_delay` seconds after the others.
constexpr double turn = 0.2;
constexpr int most_turns = 16;
constexpr double later_turns_delay = most_turns * turn;

// Other ranks may begin their waits later than this one. A rank gives them up to this many more seconds to
// report, but at most half of the limit: a rank that began even later has not yet told the others that it
// waits.
constexpr double most_delay = 5;

// The longest time between two receptions of notices, also on a rank that never waits for long.
constexpr Seconds between_hearings{1.0};

// After the failure of an operation, the news that one of its ranks is lost may take this long to arrive.
constexpr Seconds news_time{1.0};

std::string listed(std::span<const int> ranks) {
    constexpr std::size_t most = 8;
    std::string text;
    for (const int rank : ranks.first(std::min(most, ranks.size())))
        text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
    if (ranks.size() > most) text += fmt::format(" and {} more", ranks.size() - most);
    return text;
}

}  // namespace

bool is_turn_to_report(int rank, int size, double overdue, double clock) {
    const int turns = std::min(size, most_turns);
    const double now = clock / turn;
    const bool own = static_cast<std::int64_t>(std::floor(now)) % turns == rank % turns;
    // Only in the first half of the turn; the second half separates it from the next rank's turn.
    return overdue >= (rank < most_turns ? 0 : later_turns_delay) && own && now - std::floor(now) < 0.5;
}

double time_for_others(int size, double limit) {
    return std::min(size, 2 * most_turns) * turn + std::min(limit / 2, most_delay);
}

Moment moment_now() { return {Clock::now(), std::chrono::system_clock::now().time_since_epoch()}; }

void Watchdog::begin(std::string_view call, std::string_view advice) {
    end();
    call_ = call;
    advice_ = advice;
    waited_ = Seconds{0};
    last_look_ = now_().steady;
    if (last_look_ - last_heard_ < between_hearings) return;
    transport_.hear();
    last_heard_ = last_look_;
}

void Watchdog::end() {
    if (told_) transport_.tell_waiting(false);
    told_ = false;
}

void Watchdog::look(bool moved, const std::function<std::vector<int>()>& awaited) {
    const auto [now, common] = now_();
    waited_ = moved ? Seconds{0} : waited_ + std::min(Seconds(now - last_look_), longest_counted_pause);
    last_look_ = now;
    if (waited_ <= limit_ / 2) {
        end();
        return;
    }
    // A rank that itself waits for another rank is not the stuck one and must not be named. A rank that has
    // waited for long therefore tells all others, and withdraws this when something moves.
    if (!told_) transport_.tell_waiting(true);
    told_ = true;
    // Asks before the limit is reached, because some transports receive notices only when they are asked.
    const std::vector<int> ranks = awaited();
    std::vector<int> silent = ranks;
    std::erase_if(silent, [&](int rank) { return transport_.is_waiting(rank); });
    if (waited_ <= limit_) return;
    const double overdue = (waited_ - limit_).count();
    if (!is_turn_to_report(transport_.rank(), transport_.size(), overdue, common.count())) return;
    if (!silent.empty()) report(silent, silent.size() == 1 ? "does not answer" : "do not answer", silent);
    // The ranks waited for are waiting as well, so other ranks should report. If none has done so in time,
    // all wait for each other.
    if (overdue > time_for_others(transport_.size(), limit_.count()))
        report(ranks, ranks.size() == 1 ? "waits too" : "wait too", {});
}

void Watchdog::fail(std::string_view what) {
    for (const auto end = Clock::now() + news_time; Clock::now() < end;) {
        transport_.end_if_lost();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    fail_job(transport_, what);
}

void Watchdog::report(const std::vector<int>& ranks, std::string_view what_they_do,
                      std::span<const int> silent) const {
    const std::string line =
        fmt::format("rank {} waited {} s in {} for {} {}, which {}; the job ends{}{}", transport_.rank(),
                    limit_.count(), call_, ranks.size() == 1 ? "rank" : "ranks", listed(ranks), what_they_do,
                    advice_.empty() ? "" : "; ", advice_);
    // Several ranks may come here: they share turns, or on a busy machine the job has not ended within a turn.
    fail_job(transport_, line, silent);
}

}  // namespace llmc
