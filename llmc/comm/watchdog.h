// The watchdog of a wait for other ranks, by messages (exchange.h) or on a device (nccl/). If nothing moves
// for longer than the time limit, it ends the job with one line of one rank. The line names the ranks that do
// not answer.
//
// The process ends without unwinding. Memory can be freed only after operations in flight on a device, and
// these may wait for peers that are gone.
#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "llmc/comm/transport.h"

namespace llmc {

using Seconds = std::chrono::duration<double>;

// Whether it is this rank's turn to report. Several ranks find the same peer dead at about the same moment,
// and only one may report it. Each rank has its own turns on the clock, so that few ranks have to agree on the
// one that reports (fail_job). The time between turns of two ranks is as long as the end of a job usually
// takes. Ranks from 16 on begin later, so that turns stay frequent: every 3.2 s for any number of ranks.
// Beyond 32 ranks, several ranks share a turn.
//   overdue: seconds since the time limit; clock: seconds since any moment that is common to the ranks
bool is_turn_to_report(int rank, int size, double overdue, double clock);

// Seconds after the time limit until a rank may report that the ranks it waits for are waiting too. By then
// all other ranks have had turns, also those whose wait began later.
double time_for_others(int size, double limit);

// A moment on two clocks: one that never jumps, and one that is common to the ranks.
struct Moment {
    std::chrono::steady_clock::time_point steady;
    Seconds common;
};
Moment moment_now();

class Watchdog {
  public:
    // Transport and limit must outlive the watchdog; the limit may change. Tests have clocks of their own.
    Watchdog(Transport& transport, const Seconds& limit, Moment (*now)() = moment_now)
        : transport_(transport), limit_(limit), now_(now) {}

    // Begins a wait. `call` names it in messages to the user. `advice` names another possible cause if the
    // wait ends the job.
    void begin(std::string_view call, std::string_view advice = {});
    // Ends the wait. The other ranks no longer count this rank as waiting.
    void end();
    // Call it now and then until the wait is over. `moved`: whether anything moved since the last call. Does
    // not return if the limit is exceeded and it is this rank's turn to report.
    //   awaited: the ranks of the job that the wait is for
    void look(bool moved, const std::function<std::vector<int>()>& awaited);
    // The time in which nothing has moved, and whether it is long enough to justify a costly check of what
    // moves.
    Seconds waited() const { return waited_; }
    bool has_waited_long() const { return waited_ > limit_ / 4; }

    // Ends the job if the transport knows that a rank has failed or is gone.
    void end_if_lost() { transport_.end_if_lost(); }
    // Ends the job after `what` has failed. If another rank turns out to be gone within a second, the message
    // says that; otherwise it is `what`.
    [[noreturn]] void fail(std::string_view what);

  private:
    [[noreturn]] void report(const std::vector<int>& ranks, std::string_view what_they_do,
                             std::span<const int> silent) const;

    Transport& transport_;
    const Seconds& limit_;
    Moment (*now_)();
    std::string_view call_, advice_;
    Seconds waited_{0};
    std::chrono::steady_clock::time_point last_look_;
    std::chrono::steady_clock::time_point last_heard_;
    bool told_ = false;  // whether the other ranks know that this one waits
};

}  // namespace llmc
