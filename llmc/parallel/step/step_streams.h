// Runs a step's list of actions on its streams. If the device has streams, the host queues the actions on
// them (device_streams.h). If not, two threads of the host perform them (host_streams.h).
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

// Performs the actions of a list.
class Performer {
  public:
    virtual ~Performer() = default;

    // Performs an action. A transfer between stages is only begun.
    virtual void perform(const Action& action) = 0;
    // Whether such a transfer is done. If the device has no streams, it must be called until it returns true.
    virtual bool is_done(const Action& action) = 0;
};

// When an action ran, in seconds of the host's steady clock. The time of a transfer between stages begins
// when it is started, and ends when a test finds it done.
struct ActionTime {
    double begin = 0, end = 0;
};

class StepStreams {
  public:
    virtual ~StepStreams() = default;

    // Performs the whole list, or queues it on the device. Work that is queued on the compute stream
    // afterwards comes after all of it. Throws what an action throws.
    virtual void run(const Step& step, Performer& performer) = 0;

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
