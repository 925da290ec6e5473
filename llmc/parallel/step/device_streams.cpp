// Queues a step's actions on the device's streams, with the events between them.
#include "llmc/parallel/step/device_streams.h"

#include <chrono>
#include <utility>

#include "llmc/parallel/step/host_streams.h"

namespace llmc {

DeviceStreams::DeviceStreams(Streams& streams, bool overlap)
    : streams_(streams), overlap_(overlap), origin_event_(streams.new_event()), start_(streams.new_event()) {
    for (int& event : ends_) event = streams.new_event();
}

int DeviceStreams::event_of(std::vector<int>& events, int place) {
    while (std::ssize(events) <= place) events.push_back(streams_.new_event());
    return events[static_cast<std::size_t>(place)];
}

// Assigns the compute stream's time from here on to a phase.
void DeviceStreams::begin_lap(Phase phase) {
    if (laps_used_ > 0 && laps_[laps_used_ - 1].phase == phase) return;
    if (laps_used_ == laps_.size()) laps_.push_back({phase, streams_.new_event()});
    laps_[laps_used_].phase = phase;
    streams_.record(laps_[laps_used_].event);
    ++laps_used_;
}

StreamKind DeviceStreams::stream_of(const Action& action) const {
    return overlap_ || is_between_stages(action.kind) ? action.stream : StreamKind::compute;
}

void DeviceStreams::run(const Step& step, Performer& performer) {
    is_awaited_.assign(step.actions.size(), false);
    std::array<bool, all_streams.size()> is_used{};
    for (const Action& action : step.actions) {
        for (const int place : action.after) is_awaited_[static_cast<std::size_t>(place)] = true;
        is_used[static_cast<std::size_t>(stream_of(action))] = true;
    }
    const auto for_each_other = [&](auto&& f) {
        for (const StreamKind stream : all_streams) {
            if (stream != StreamKind::compute && is_used[static_cast<std::size_t>(stream)]) f(stream);
        }
    };

    laps_used_ = 0;
    streams_.select(StreamKind::compute);
    action_times_.resize(watches_ ? step.actions.size() : 0);
    if (watches_) {
        streams_.record(origin_event_);
        streams_.wait_on_host(origin_event_);
        origin_ = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    // The actions wait for the end of the last list, and for work queued on the compute stream since then,
    // such as copies of weights to the device.
    bool has_set = false;
    for_each_other([&](StreamKind stream) {
        if (!std::exchange(has_set, true)) streams_.record(start_);
        streams_.select(stream);
        streams_.wait(start_);
    });
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = step.actions[static_cast<std::size_t>(place)];
        const StreamKind stream = stream_of(action);
        streams_.select(stream);
        for (const int after : action.after) {
            if (stream_of(step.actions[static_cast<std::size_t>(after)]) == stream) continue;
            if (stream == StreamKind::compute) begin_lap(Phase::communication);
            streams_.wait(event_of(events_, after));
        }
        if (stream == StreamKind::compute) begin_lap(phase_of(action.kind));
        if (watches_) streams_.record(event_of(begin_events_, place));
        performer.perform(action);
        if (watches_ || is_awaited_[static_cast<std::size_t>(place)])
            streams_.record(event_of(events_, place));
    }
    for_each_other([&](StreamKind stream) {
        const int end = ends_[static_cast<std::size_t>(stream)];
        streams_.select(stream);
        streams_.record(end);
        streams_.select(StreamKind::compute);
        begin_lap(Phase::communication);
        streams_.wait(end);
    });
    streams_.select(StreamKind::compute);
    // The end of the last lap.
    if (laps_used_ == laps_.size()) laps_.push_back({Phase::data, streams_.new_event()});
    streams_.record(laps_[laps_used_].event);
}

PhaseTimes DeviceStreams::times() {
    PhaseTimes times;
    for (std::size_t i = 0; i < laps_used_; ++i)
        times[laps_[i].phase] += streams_.milliseconds(laps_[i].event, laps_[i + 1].event);
    return times;
}

std::span<const ActionTime> DeviceStreams::action_times() {
    const auto at = [&](int event) { return origin_ + 1e-3 * streams_.milliseconds(origin_event_, event); };
    for (std::size_t place = 0; place < action_times_.size(); ++place)
        action_times_[place] = {at(begin_events_[place]), at(events_[place])};
    return action_times_;
}

std::unique_ptr<StepStreams> make_step_streams(Device& device, bool overlap) {
    if (Streams* streams = device.streams()) return std::make_unique<DeviceStreams>(*streams, overlap);
    return std::make_unique<HostStreams>(overlap);
}

}  // namespace llmc
