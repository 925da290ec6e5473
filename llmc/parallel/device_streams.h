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
    void watch_actions(bool on) override { watches_ = on; }
    // As the device measured them: the host's clock is read once, where the list begins.
    std::span<const ActionTime> action_times() override;

  private:
    // From a mark to the next of these the compute queue was in a phase.
    struct Lap {
        Phase phase;
        int mark;
    };

    StreamKind queue_of(const Action& action) const;
    void begin_lap(Phase phase);
    int mark_of(std::vector<int>& marks, int place);

    Queues& queues_;
    bool overlap_;
    std::vector<int> marks_;  // behind the action at that place in a list
    // Of lists that are watched: before the actions, and where the list begins.
    bool watches_ = false;
    std::vector<int> begin_marks_;
    int origin_mark_;
    double origin_ = 0;  // seconds of the host's clock
    std::vector<ActionTime> action_times_;
    std::vector<bool> is_awaited_;
    int start_;
    std::array<int, all_streams.size()> ends_;  // marks behind each stream's last action
    std::vector<Lap> laps_;                     // of the last list; its marks are kept for the next one
    std::size_t laps_used_ = 0;
};

}  // namespace llmc
