// Runs a step on the device's streams. The host queues the actions in the order of the list. If an action
// depends on another stream (Action::after), its stream waits for an event, and the host does not wait.
//
// The host itself performs the actions of its streams, updates and transfers of the disk, when the list comes to them:
// it waits until the device has done what they need, and the device goes on with what is queued. So what the device
// needs of the host's results is placed as late in a list as its need allows.
#pragma once

#include <array>
#include <vector>

#include "llmc/parallel/step/step_streams.h"

namespace llmc {

class DeviceStreams final : public StepStreams {
  public:
    // Without `overlap`, all actions run on the compute stream, except transfers between stages. Two stages
    // that sent to each other on one stream would deadlock.
    DeviceStreams(Streams& streams, bool overlap);

    void run(const Step& step, Performer& performer) override;
    // The times that the device measured on the compute stream.
    PhaseTimes times() override;
    void watch_actions(bool on) override { watches_ = on; }
    // As the device measured them. The host's clock is read once, at the start of the list.
    std::span<const ActionTime> action_times() override;

  private:
    // A time span of the compute stream that belongs to one phase: from `event` to the event of the next lap.
    struct Lap {
        Phase phase;
        int event;
    };

    StreamKind stream_of(const Action& action) const;
    void begin_lap(Phase phase);
    void queue(const Step& step, int place, Performer& performer);
    void perform_on_host(const Step& step, int place, Performer& performer);
    void finish_transfers(const Step& step, int last, StreamKind stream, Performer& performer);
    int event_after(int place);
    void record_time(std::vector<int>& events, int place);

    Streams& streams_;
    bool overlap_;
    std::vector<int> events_;  // by position in the list: recorded after the action
    // For lists whose actions are timed: events before and after the actions, and at the start of the list.
    bool watches_ = false;
    std::vector<int> begin_events_, end_events_;
    int origin_event_;
    double origin_ = 0;  // seconds of the host's clock
    std::vector<ActionTime> action_times_;
    std::vector<bool> is_awaited_;
    std::vector<int> in_flight_;  // transfers of the disk, by position in the list
    int start_;
    std::array<int, all_streams.size()> ends_;  // recorded after each stream's last action
    std::vector<Lap> laps_;                     // those of the last list; the next list reuses their events
    std::size_t laps_used_ = 0;
};

}  // namespace llmc
