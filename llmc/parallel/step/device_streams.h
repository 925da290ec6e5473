// The streams of a device. The host queues the actions in the order of the list. If an action depends on another
// stream (Action::after), its stream waits for an event, and the host does not wait.
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

    void begin(const Step& step, const Perform& perform) override;
    void wait_before(int place) override;
    void record(int place, TransferTest test) override;
    void finish() override;
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
    template <class F>
    void for_each_other(F&& f);
    void finish_transfers(int last, StreamKind stream);
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
    const Step* step_ = nullptr;                      // the list that runs
    std::vector<bool> is_awaited_;                    // by position in the list
    std::array<bool, all_streams.size()> is_used_{};  // by stream
    std::vector<InFlight> in_flight_;                 // transfers of the disk
    int start_;
    std::array<int, all_streams.size()> ends_;  // recorded after each stream's last action
    std::vector<Lap> laps_;                     // those of the last list; the next list reuses their events
    std::size_t laps_used_ = 0;
};

}  // namespace llmc
