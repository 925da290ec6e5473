// The waits between the actions of a list. The executor performs the actions in the order of the list. If the device
// has streams, they are queued there, with events between them (device_streams.h). If not, other threads of the host
// perform those that communicate (host_streams.h).
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "llmc/core/text.h"
#include "llmc/device/device.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

// Milliseconds by phase.
class PhaseTimes {
  public:
    double& operator[](Phase phase) { return milliseconds_[static_cast<std::size_t>(phase)]; }
    double operator[](Phase phase) const { return milliseconds_[static_cast<std::size_t>(phase)]; }

  private:
    std::array<double, all_phases.size()> milliseconds_{};
};

// Tests whether a transfer that was begun is done. If the device has no streams, it must be called until it returns
// true. Empty: the transfer is done.
using TransferTest = std::function<bool()>;
// Performs an action. One that is only begun (is_begun_only) returns its test.
using Perform = std::function<TransferTest(const Action&)>;
// A transfer in flight, by its position in the list.
struct InFlight {
    int place;
    TransferTest test;

    bool is_done() const { return !test || test(); }
};

// When an action ran, in seconds of the host's steady clock. The time of a transfer between stages begins
// when it is started, and ends when a test finds it done.
struct ActionTime {
    double begin = 0, end = 0;
};

class StepStreams {
  public:
    virtual ~StepStreams() = default;

    // Begins a list. The caller performs its actions in their order, except those on a lane: a thread of the streams
    // performs these by `perform`. Both arguments outlive the list, which ends with finish() or cancel().
    virtual void begin(const Step& step, const Perform& perform) = 0;
    virtual bool is_on_lane(const Action&) const { return false; }
    // Before the action at a place of the list: waits for the actions on which it depends, or has its stream wait.
    // Throws what an action on a lane has thrown.
    virtual void wait_before(int place) = 0;
    // After the action; `test` is that of a transfer.
    virtual void record(int place, TransferTest test) = 0;
    // Waits for all actions, or has the compute stream wait: work that is queued there from now on comes after them.
    // Throws what an action on a lane has thrown.
    virtual void finish() = 0;
    // Ends a list if an action has thrown. When it returns, no lane performs an action of the list.
    virtual void cancel() {}

    // The time of each phase of the last list, once the device has finished it.
    virtual PhaseTimes times() = 0;

    // Turns the measurement of each action's time on or off, from the next list on; it costs a little.
    // action_times() has the times of the last list, by position, once the device has finished it.
    virtual void watch_actions(bool on) = 0;
    virtual std::span<const ActionTime> action_times() = 0;
};

// Makes the streams for a device, which outlives the result. Without `overlap`, all actions run one after
// another in the order of the list. Only transfers between stages still overlap, as two stages may send to
// each other at once.
std::unique_ptr<StepStreams> make_step_streams(Device& device, bool overlap);

}  // namespace llmc
