// Who walks a step's list of actions on its streams: threads of the host, where the device does at once what it
// is given (host_streams.h), or the host alone, where the device has queues (device_streams.h).
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "llmc/device/device.h"
#include "llmc/parallel/phase.h"
#include "llmc/parallel/step.h"

namespace llmc {

// What performs a list's actions.
class Performer {
  public:
    virtual ~Performer() = default;

    // What goes between stages is only begun.
    virtual void perform(const Action& action) = 0;
    // Of such an action that was begun: to be asked, where the device has no queues, until it is done.
    virtual bool is_done(const Action& action) = 0;
};

// When an action ran, in seconds of the host's steady clock. What goes between stages begins where it may, and ends where
// it is seen to be done.
struct ActionTime {
    double begin = 0, end = 0;
};

class StepStreams {
  public:
    virtual ~StepStreams() = default;

    // Performs the whole list, or gives it to the device: what is given to the compute queue afterwards comes
    // after all of it. What an action throws is thrown here.
    virtual void run(const Step& step, Performer& performer) = 0;

    // Where the time of the last list went, once the device is through with it.
    virtual PhaseTimes times() = 0;

    // Whether each action's time is taken, from the next list on, which costs a little; and those of the last list, by
    // their places in it, once the device is through with it.
    virtual void watch_actions(bool on) = 0;
    virtual std::span<const ActionTime> action_times() = 0;
};

// Without `overlap` all actions run one after the other, in the order of the list, but for what goes between stages,
// which two may send each other at once. The device outlives the result.
std::unique_ptr<StepStreams> make_step_streams(Device& device, bool overlap);

}  // namespace llmc
