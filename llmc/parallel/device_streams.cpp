#include "llmc/parallel/device_streams.h"

#include <chrono>
#include <utility>

#include "llmc/parallel/host_streams.h"

namespace llmc {

DeviceStreams::DeviceStreams(Queues& queues, bool overlap)
    : queues_(queues), overlap_(overlap), origin_mark_(queues.new_mark()), start_(queues.new_mark()) {
    for (int& mark : ends_) mark = queues.new_mark();
}

int DeviceStreams::mark_of(std::vector<int>& marks, int place) {
    while (std::ssize(marks) <= place) marks.push_back(queues_.new_mark());
    return marks[static_cast<std::size_t>(place)];
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
    action_times_.resize(watches_ ? step.actions.size() : 0);
    if (watches_) {
        queues_.set(origin_mark_);
        queues_.wait_on_host(origin_mark_);
        origin_ = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    // Nothing of this list begins before the last one has ended, and what was given to the compute queue since, such as
    // weights on their way to the device.
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
            queues_.wait(mark_of(marks_, after));
        }
        if (queue == StreamKind::compute) begin_lap(phase_of(action.kind));
        if (watches_) queues_.set(mark_of(begin_marks_, place));
        performer.perform(action);
        if (watches_ || is_awaited_[static_cast<std::size_t>(place)]) queues_.set(mark_of(marks_, place));
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

std::span<const ActionTime> DeviceStreams::action_times() {
    const auto at = [&](int mark) { return origin_ + 1e-3 * queues_.milliseconds(origin_mark_, mark); };
    for (std::size_t place = 0; place < action_times_.size(); ++place)
        action_times_[place] = {at(begin_marks_[place]), at(marks_[place])};
    return action_times_;
}

std::unique_ptr<StepStreams> make_step_streams(Device& device, bool overlap) {
    if (Queues* queues = device.queues()) return std::make_unique<DeviceStreams>(*queues, overlap);
    return std::make_unique<HostStreams>(overlap);
}

}  // namespace llmc
