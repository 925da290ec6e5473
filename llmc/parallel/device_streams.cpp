#include "llmc/parallel/device_streams.h"

#include "llmc/parallel/host_streams.h"

namespace llmc {

DeviceStreams::DeviceStreams(Queues& queues, bool overlap)
    : queues_(queues),
      overlap_(overlap),
      start_(queues.new_mark()),
      end_of_communication_(queues.new_mark()) {}

int DeviceStreams::mark_of(int place) {
    while (std::ssize(marks_) <= place) marks_.push_back(queues_.new_mark());
    return marks_[static_cast<std::size_t>(place)];
}

// From here on the compute queue's time is the phase's.
void DeviceStreams::begin_lap(Phase phase) {
    if (laps_used_ > 0 && laps_[laps_used_ - 1].phase == phase) return;
    if (laps_used_ == laps_.size()) laps_.push_back({phase, queues_.new_mark()});
    laps_[laps_used_].phase = phase;
    queues_.set(laps_[laps_used_].mark);
    ++laps_used_;
}

void DeviceStreams::run(const Step& step, const Perform& perform) {
    is_awaited_.assign(step.actions.size(), false);
    bool communicates = false;
    for (const Action& action : step.actions) {
        if (action.after >= 0) is_awaited_[static_cast<std::size_t>(action.after)] = true;
        communicates |= overlap_ && action.stream == StreamKind::communication;
    }

    laps_used_ = 0;
    queues_.select(StreamKind::compute);
    if (communicates) {
        // Nothing of this list begins before the last one has ended.
        queues_.set(start_);
        queues_.select(StreamKind::communication);
        queues_.wait(start_);
        queues_.select(StreamKind::compute);
    }
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = step.actions[static_cast<std::size_t>(place)];
        const bool beside = communicates && action.stream == StreamKind::communication;
        queues_.select(beside ? StreamKind::communication : StreamKind::compute);
        if (communicates && action.after >= 0) {
            if (!beside) begin_lap(Phase::communication);
            queues_.wait(mark_of(action.after));
        }
        if (!beside) begin_lap(phase_of(action.kind));
        perform(action);
        if (communicates && is_awaited_[static_cast<std::size_t>(place)]) queues_.set(mark_of(place));
    }
    if (communicates) {
        queues_.select(StreamKind::communication);
        queues_.set(end_of_communication_);
        queues_.select(StreamKind::compute);
        begin_lap(Phase::communication);
        queues_.wait(end_of_communication_);
    }
    queues_.select(StreamKind::compute);
    // Where the last lap ends.
    if (laps_used_ == laps_.size()) laps_.push_back({Phase::data, queues_.new_mark()});
    queues_.set(laps_[laps_used_].mark);
}

PhaseTimes DeviceStreams::times() {
    PhaseTimes times;
    for (std::size_t i = 0; i < laps_used_; ++i)
        times[laps_[i].phase] += queues_.milliseconds(laps_[i].mark, laps_[i + 1].mark);
    return times;
}

std::unique_ptr<StepStreams> make_step_streams(Device& device, bool overlap) {
    if (Queues* queues = device.queues()) return std::make_unique<DeviceStreams>(*queues, overlap);
    return std::make_unique<HostStreams>(overlap);
}

}  // namespace llmc
