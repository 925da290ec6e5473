// Stopping a run by a signal. After SIGINT (Ctrl-C), SIGHUP (its terminal is closed), SIGUSR1 or SIGTERM the
// run finishes its step, saves and ends. A second signal ends it at once. Schedulers send SIGUSR1 before a
// job's time is over, and the launcher (comm/launcher.h) sends it for Ctrl-C. Under mpirun, SIGTERM is not
// caught, because mpirun sends it to end its processes.
#pragma once

#include <string>

#include "llmc/comm/communicator.h"

namespace llmc {

// The exit status of a run that was stopped by a signal and can be resumed. It is EX_TEMPFAIL of sysexits.h,
// "try again later". A scheduler can tell it from success (0) and failure (1).
inline constexpr int stopped_status = 75;

// Whether `here` is true on any rank. All ranks call it and get the same answer.
bool on_any_rank(Communicator& ranks, bool here);

// Catches the signals during its lifetime. Only one object may exist. A signal that was ignored stays
// ignored.
class StopSignals {
  public:
    StopSignals();
    ~StopSignals();
    StopSignals(const StopSignals&) = delete;
    StopSignals& operator=(const StopSignals&) = delete;

    // Signals write nothing at first. From now on, the first one writes `acknowledgement` to standard output.
    // The second writes `farewell` and ends the process. Call it once.
    void answer_with(std::string acknowledgement, std::string farewell);

    // Whether this process received one of the signals.
    bool here() const;
    // If only Ctrl-C came so far, it has done what it was to do. The other signals are for the process.
    void forget_interrupt();
    // Whether any rank received one. Ranks may receive a signal in different steps, but all must stop after
    // the same step.
    bool anywhere(Communicator& ranks) const { return on_any_rank(ranks, here()); }

  private:
    std::string acknowledgement_, farewell_;
};

}  // namespace llmc
