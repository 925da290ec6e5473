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

// A look that comes late counts for no more than this: a job that was stopped and continued as a whole has
// not waited for anyone.
constexpr Seconds longest_counted_pause{1.0};

// Turns to speak: their seconds, and after how many ranks the first one's comes again. Ranks beyond these come so much
// later.
constexpr double turn = 0.2;
constexpr int most_turns = 16;
constexpr double later = most_turns * turn;

// How much later than another a rank may begin to wait, and still be the one to say what both wait for. (One that is later
// by half of the limit has not yet told that it waits.)
constexpr double most_delay = 5;

// What others tell is taken in so often at least: by a rank that never waits for long too.
constexpr Seconds between_hearings{1.0};

// How long the news that a rank is gone may be behind the failure of what it had a part in.
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

bool is_turn_to_speak(int rank, int size, double overdue, double clock) {
    const int turns = std::min(size, most_turns);
    const double now = clock / turn;
    const bool own = static_cast<std::int64_t>(std::floor(now)) % turns == rank % turns;
    // Only in the first half: the second separates this turn from the next rank's.
    return overdue >= (rank < most_turns ? 0 : later) && own && now - std::floor(now) < 0.5;
}

double time_for_others(int size, double limit) {
    return std::min(size, 2 * most_turns) * turn + std::min(limit / 2, most_delay);
}

void Watchdog::begin(std::string_view call, std::string_view advice) {
    end();
    call_ = call;
    advice_ = advice;
    waited_ = Seconds{0};
    last_look_ = Clock::now();
    if (last_look_ - last_heard_ < between_hearings) return;
    transport_.hear();
    last_heard_ = last_look_;
}

void Watchdog::end() {
    if (told_) transport_.tell_waiting(false);
    told_ = false;
}

void Watchdog::look(bool moved, const std::function<std::vector<int>()>& awaited) {
    const Clock::time_point now = Clock::now();
    waited_ = moved ? Seconds{0} : waited_ + std::min(Seconds(now - last_look_), longest_counted_pause);
    last_look_ = now;
    if (waited_ <= limit_ / 2) {
        end();
        return;
    }
    // Ranks in a chain of waiting are not the one that is stuck: so that none of them is named, a rank that has
    // waited for long tells all others, and takes it back where something moves.
    if (!told_) transport_.tell_waiting(true);
    told_ = true;
    // Asked for before it matters, as a transport may only then begin to hear.
    const std::vector<int> ranks = awaited();
    std::vector<int> silent = ranks;
    std::erase_if(silent, [&](int rank) { return transport_.is_waiting(rank); });
    if (waited_ <= limit_) return;
    const double overdue = (waited_ - limit_).count();
    const Seconds clock = std::chrono::system_clock::now().time_since_epoch();
    if (!is_turn_to_speak(transport_.rank(), transport_.size(), overdue, clock.count())) return;
    if (!silent.empty()) report(silent, silent.size() == 1 ? "does not answer" : "do not answer");
    // Those waited for are waiting as well, so it is for others to speak. Where none of them has done so in time, all wait
    // for each other.
    if (overdue > time_for_others(transport_.size(), limit_.count()))
        report(ranks, ranks.size() == 1 ? "waits too" : "wait too");
}

void Watchdog::fail(std::string_view what) {
    for (const auto end = Clock::now() + news_time; Clock::now() < end;) {
        transport_.end_if_lost();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    fail_job(transport_, what);
}

void Watchdog::report(const std::vector<int>& ranks, std::string_view what_they_do) const {
    const std::string line =
        fmt::format("rank {} waited {} s in {} for {} {}, which {}; the job ends{}{}", transport_.rank(),
                    limit_.count(), call_, ranks.size() == 1 ? "rank" : "ranks", listed(ranks), what_they_do,
                    advice_.empty() ? "" : "; ", advice_);
    // Where ranks have turns in common they settle who speaks, which takes longer where rank 0 is the one that is stuck.
    if (transport_.size() > 2 * most_turns) fail_job(transport_, line);
    abort_job(transport_, fmt::format("error: {}", line));
}

}  // namespace llmc
