#include "llmc/parallel/device_streams.h"

#include <utility>

#include "llmc/parallel/host_streams.h"

namespace llmc {

DeviceStreams::DeviceStreams(Queues& queues, bool overlap)
    : queues_(queues), overlap_(overlap), start_(queues.new_mark()) {
    for (int& mark : ends_) mark = queues.new_mark();
}

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

StreamKind DeviceStreams::queue_of(const Action& action) const {
    return overlap_ || is_between_stages(action.kind) ? action.stream : StreamKind::compute;
}

void DeviceStreams::run(const Step& step, Performer& performer) {
    is_awaited_.assign(step.actions.size(), false);
    std::array<bool, all_streams.size()> is_used{};
    for (const Action& action : step.actions) {
        for (const int place : action.after) is_awaited_[static_cast<std::size_t>(place)] = true;
        is_used[static_cast<std::size_t>(queue_of(action))] = true;
    }
    const auto for_each_other = [&](auto&& f) {
        for (const StreamKind stream : all_streams) {
            if (stream != StreamKind::compute && is_used[static_cast<std::size_t>(stream)]) f(stream);
        }
    };

    laps_used_ = 0;
    queues_.select(StreamKind::compute);
    // Nothing of this list begins before the last one has ended.
    bool has_set = false;
    for_each_other([&](StreamKind stream) {
        if (!std::exchange(has_set, true)) queues_.set(start_);
        queues_.select(stream);
        queues_.wait(start_);
    });
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = step.actions[static_cast<std::size_t>(place)];
        const StreamKind queue = queue_of(action);
        queues_.select(queue);
        for (const int after : action.after) {
            if (queue_of(step.actions[static_cast<std::size_t>(after)]) == queue) continue;
            if (queue == StreamKind::compute) begin_lap(Phase::communication);
            queues_.wait(mark_of(after));
        }
        if (queue == StreamKind::compute) begin_lap(phase_of(action.kind));
        performer.perform(action);
        if (is_awaited_[static_cast<std::size_t>(place)]) queues_.set(mark_of(place));
    }
    for_each_other([&](StreamKind stream) {
        const int end = ends_[static_cast<std::size_t>(stream)];
        queues_.select(stream);
        queues_.set(end);
        queues_.select(StreamKind::compute);
        begin_lap(Phase::communication);
        queues_.wait(end);
    });
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
