// Stopping when asked. Ctrl-C (SIGINT), SIGUSR1 (which schedulers send before a job's time is over, and
// scripts/launch.sh for Ctrl-C) and SIGTERM ask a run to finish the step under way, save and end; a second one ends
// it at once. SIGTERM only where the program was started alone: mpirun sends it to end its processes.
#pragma once

#include <string>

#include "llmc/comm/communicator.h"

namespace llmc {

// Of a run that was asked to stop and goes on with --resume: EX_TEMPFAIL of sysexits.h, "try again later", so that a
// scheduler tells it from one that is done (0) and one that failed (1).
inline constexpr int stopped_status = 75;

// Whether it is so on any rank. All ranks call it and receive the same answer: a sum of one number.
bool on_any_rank(Communicator& ranks, bool here);

// Catches the signals as long as it lives; one at a time. A signal that was ignored stays ignored.
class StopSignals {
  public:
    StopSignals();
    ~StopSignals();
    StopSignals(const StopSignals&) = delete;
    StopSignals& operator=(const StopSignals&) = delete;

    // From now on the first signal writes `acknowledgement` to standard output, and a second one `farewell` before
    // it ends the process. Called once.
    void answer_with(std::string acknowledgement, std::string farewell);

    // From now on nothing is written.
    void answer_silently();

    // Whether this process was asked to stop.
    bool here() const;
    // Whether any rank was: so that all stop after the same step, though the signal may come to one rank in
    // another step than to the next.
    bool anywhere(Communicator& ranks) const { return on_any_rank(ranks, here()); }

  private:
    std::string acknowledgement_, farewell_;
};

}  // namespace llmc
