// The watchdog of a wait for other ranks, by messages (exchange.h) or on a device (nccl/): a wait in which nothing moves
// for longer than the time limit ends the job with one line of one rank, which names those that do not answer.
//
// The process ends where it is. Nothing is unwound: what is under way on a device would have to end before its memory
// can be freed, and the peers for which it waits may be gone.
#pragma once

#include <chrono>
#include <functional>
#include <string_view>
#include <vector>

#include "llmc/comm/transport.h"

namespace llmc {

using Seconds = std::chrono::duration<double>;

// Several ranks find the same peer dead at about the same moment, and only one may say so. Each has turns of
// its own on the clock, apart from those of the others by as long as the end of a job takes. Ranks beyond the
// first 16 come later still, so that the turns stay frequent: 3.2 s, however many there are, so that beyond 32 ranks
// have turns in common.
//   overdue: seconds since the time limit; clock: seconds since any moment that is common to the ranks
bool is_turn_to_speak(int rank, int size, double overdue, double clock);

// Seconds after the time limit until a rank may say that those for which it waits are waiting too: all others have had
// turns by then, those too whose wait began later.
double time_for_others(int size, double limit);

class Watchdog {
  public:
    // Both outlive it; the limit may change.
    Watchdog(Transport& transport, const Seconds& limit) : transport_(transport), limit_(limit) {}

    // A wait begins. `call` names it to a person, `advice` says what else may be the reason if it ends the job.
    void begin(std::string_view call, std::string_view advice = {});
    // It is over, and the other ranks do not take this one for waiting any more.
    void end();
    // To be called now and then until the wait is over, with whether anything moved since. Does not return where the
    // limit is exceeded and it is this rank's turn to say so.
    //   awaited: the ranks of the job that the wait is for
    void look(bool moved, const std::function<std::vector<int>()>& awaited);
    // Without anything moving; whether that is so long that it is worth an effort to see what moves.
    Seconds waited() const { return waited_; }
    bool has_waited_long() const { return waited_ > limit_ / 4; }

    // Ends the job if a rank has failed or is gone, where the transport knows of such.
    void end_if_lost() { transport_.end_if_lost(); }
    // `what` has failed, perhaps since another rank is gone: ends the job with that, if it shows soon, or with `what`.
    [[noreturn]] void fail(std::string_view what);

  private:
    [[noreturn]] void report(const std::vector<int>& ranks, std::string_view what_they_do) const;

    Transport& transport_;
    const Seconds& limit_;
    std::string_view call_, advice_;
    Seconds waited_{0};
    std::chrono::steady_clock::time_point last_look_;
    std::chrono::steady_clock::time_point last_heard_;
    bool told_ = false;  // the other ranks that this one is waiting
};

}  // namespace llmc
