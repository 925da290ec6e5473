// The streams of an asynchronous device. Work in one stream runs in order. Streams run concurrently, except
// for the waits below. The CPU device has no streams: each call finishes before it returns.
#pragma once

#include <array>
#include <string_view>

namespace llmc {

// Operations run in `compute`. Communication between ranks has its own stream, so that it need not wait for
// operations. Transfers between pipeline stages have a stream per kind and direction, so that none waits for
// another. `copy` copies the next batch.
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

class Streams {
  public:
    virtual ~Streams() = default;

    // Work that the host submits from now on goes to this stream: operations, copies and communication.
    virtual void select(StreamKind stream) = 0;

    // Creates an event, which can be recorded again and again.
    virtual int new_event() = 0;
    // Records the event after all work that is in the selected stream now.
    virtual void record(int event) = 0;
    // Work submitted to the selected stream from now on waits for the last record of `event`.
    virtual void wait(int event) = 0;
    // The host waits for the event.
    virtual void wait_on_host(int event) = 0;

    // The milliseconds from one event to another; both must be complete.
    virtual double milliseconds(int from, int to) = 0;
};

}  // namespace llmc
