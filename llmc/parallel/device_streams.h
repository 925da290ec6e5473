// The streams of a step as queues of the device: the host gives the actions in the order of the list, each to
// the queue of its stream, and where one depends on another queue (Action::after) the queue waits, not the host.
#pragma once

#include <array>
#include <vector>

#include "llmc/parallel/step_streams.h"

namespace llmc {

class DeviceStreams final : public StepStreams {
  public:
    // Without `overlap` everything goes to the compute queue, but for what goes between stages: two that sent each other
    // something from one queue would wait for ever.
    DeviceStreams(Queues& queues, bool overlap);

    void run(const Step& step, Performer& performer) override;
    // As the device measured it, on the compute queue.
    PhaseTimes times() override;

  private:
    // From a mark to the next of these the compute queue was in a phase.
    struct Lap {
        Phase phase;
        int mark;
    };

    StreamKind queue_of(const Action& action) const;
    void begin_lap(Phase phase);
    int mark_of(int place);

    Queues& queues_;
    bool overlap_;
    std::vector<int> marks_;  // behind the action at that place in a list
    std::vector<bool> is_awaited_;
    int start_;
    std::array<int, all_streams.size()> ends_;  // marks behind each stream's last action
    std::vector<Lap> laps_;                     // of the last list; its marks are kept for the next one
    std::size_t laps_used_ = 0;
};

}  // namespace llmc
