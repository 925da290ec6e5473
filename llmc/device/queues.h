// A device that works behind its caller: what it is given is queued, and runs when what stands before it in its
// queue is done. Queues run beside each other, but for the waits below. (The CPU device has none: what it is given
// is done when the call returns.)
#pragma once

#include <array>
#include <string_view>

namespace llmc {

// What goes where: operations; the communication between ranks, which must not wait behind them; what goes from one
// pipeline stage to the next, each kind and direction apart, so that none waits behind another; the copies of the
// next batch.
enum class StreamKind {
    compute,
    communication,
    activations_in,
    activations_out,
    gradients_in,
    gradients_out,
    copy
};
inline constexpr std::array all_streams = {StreamKind::compute,
                                           StreamKind::communication,
                                           StreamKind::activations_in,
                                           StreamKind::activations_out,
                                           StreamKind::gradients_in,
                                           StreamKind::gradients_out,
                                           StreamKind::copy};
std::string_view name_of(StreamKind stream);

class Queues {
  public:
    virtual ~Queues() = default;

    // Operations, copies and communication that the host gives from now on go here.
    virtual void select(StreamKind stream) = 0;

    // A mark that can be set, again and again.
    virtual int new_mark() = 0;
    // Sets it behind all that the selected queue holds so far.
    virtual void set(int mark) = 0;
    // What the selected queue is given from now on waits until `mark`, where it was set last, is reached.
    virtual void wait(int mark) = 0;
    // The host waits for it.
    virtual void wait_on_host(int mark) = 0;

    // The milliseconds from one mark to another, once both are reached.
    virtual double milliseconds(int from, int to) = 0;
};

}  // namespace llmc
