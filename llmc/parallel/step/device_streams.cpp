// Queues a step's actions on the device's streams, with the events between them.
#include "llmc/parallel/step/device_streams.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "llmc/parallel/step/host_streams.h"

namespace llmc {

namespace {

// The time between two tests of whether a transfer of the disk is done.
constexpr std::chrono::microseconds nap{50};

}  // namespace

DeviceStreams::DeviceStreams(Streams& streams, bool overlap)
    : streams_(streams),
      overlap_(overlap),
      origin_event_(streams.new_timed_event()),
      start_(streams.new_event()) {
    for (int& event : ends_) event = streams.new_event();
}

int DeviceStreams::event_after(int place) {
    while (std::ssize(events_) <= place) events_.push_back(streams_.new_event());
    return events_[static_cast<std::size_t>(place)];
}

// Records the time at which an action begins or ends, if actions are timed.
void DeviceStreams::record_time(std::vector<int>& events, int place) {
    if (!watches_) return;
    while (std::ssize(events) <= place) events.push_back(streams_.new_timed_event());
    streams_.record(events[static_cast<std::size_t>(place)]);
}

// Assigns the compute stream's time from here on to a phase.
void DeviceStreams::begin_lap(Phase phase) {
    if (laps_used_ > 0 && laps_[laps_used_ - 1].phase == phase) return;
    if (laps_used_ == laps_.size()) laps_.push_back({phase, streams_.new_timed_event()});
    laps_[laps_used_].phase = phase;
    streams_.record(laps_[laps_used_].event);
    ++laps_used_;
}

StreamKind DeviceStreams::stream_of(const Action& action) const {
    const bool has_stream = overlap_ || is_between_stages(action.kind) || is_of_host(action.stream);
    return has_stream ? action.stream : StreamKind::compute;
}

void DeviceStreams::run(const Step& step, Performer& performer) {
    is_awaited_.assign(step.actions.size(), false);
    std::array<bool, all_streams.size()> is_used{};
    for (const Action& action : step.actions) {
        for (const int place : action.after) is_awaited_[static_cast<std::size_t>(place)] = true;
        is_used[static_cast<std::size_t>(stream_of(action))] = true;
    }
    const bool has_host =
        std::ranges::any_of(step.actions, [](const Action& action) { return is_of_host(action.stream); });
    const auto for_each_other = [&](auto&& f) {
        for (const StreamKind stream : device_streams) {
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
    // The host may use its buffers only after copies of the last list.
    if (has_host) {
        streams_.select(StreamKind::compute);
        streams_.record(start_);
        streams_.wait_on_host(start_);
    }
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const bool is_on_host = is_of_host(step.actions[static_cast<std::size_t>(place)].stream);
        is_on_host ? perform_on_host(step, place, performer) : queue(step, place, performer);
    }
    for (const StreamKind stream : {StreamKind::disk_in, StreamKind::disk_out})
        finish_transfers(step, static_cast<int>(step.actions.size()), stream, performer);
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
    if (laps_used_ == laps_.size()) laps_.push_back({Phase::data, streams_.new_timed_event()});
    streams_.record(laps_[laps_used_].event);
}

void DeviceStreams::queue(const Step& step, int place, Performer& performer) {
    const Action& action = step.actions[static_cast<std::size_t>(place)];
    const StreamKind stream = stream_of(action);
    streams_.select(stream);
    for (const int after : action.after) {
        const StreamKind other = stream_of(step.actions[static_cast<std::size_t>(after)]);
        if (other == stream) continue;
        if (is_of_host(other)) {
            finish_transfers(step, after, other, performer);
            continue;
        }
        if (stream == StreamKind::compute) begin_lap(Phase::communication);
        streams_.wait(event_after(after));
    }
    if (stream == StreamKind::compute) begin_lap(phase_of(action.kind));
    record_time(begin_events_, place);
    performer.perform(action);
    record_time(end_events_, place);
    if (is_awaited_[static_cast<std::size_t>(place)]) streams_.record(event_after(place));
}

void DeviceStreams::perform_on_host(const Step& step, int place, Performer& performer) {
    const Action& action = step.actions[static_cast<std::size_t>(place)];
    // Time for which the device is idle until the host goes on counts to what the host does.
    streams_.select(StreamKind::compute);
    begin_lap(phase_of(action.kind));
    for (const int after : action.after) {
        const StreamKind other = stream_of(step.actions[static_cast<std::size_t>(after)]);
        if (is_of_host(other)) {
            finish_transfers(step, after, other, performer);
        } else {
            streams_.wait_on_host(event_after(after));
        }
    }
    record_time(begin_events_, place);
    performer.perform(action);
    if (is_begun_only(action)) in_flight_.push_back(place);
    record_time(end_events_, place);
}

// Waits for a stream's transfers of the disk up to a position in the list.
void DeviceStreams::finish_transfers(const Step& step, int last, StreamKind stream, Performer& performer) {
    std::erase_if(in_flight_, [&](int place) {
        const Action& action = step.actions[static_cast<std::size_t>(place)];
        if (place > last || action.stream != stream) return false;
        while (!performer.is_done(action)) std::this_thread::sleep_for(nap);
        return true;
    });
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
        action_times_[place] = {at(begin_events_[place]), at(end_events_[place])};
    return action_times_;
}

std::unique_ptr<StepStreams> make_step_streams(Device& device, bool overlap) {
    if (Streams* streams = device.streams()) return std::make_unique<DeviceStreams>(*streams, overlap);
    return std::make_unique<HostStreams>(overlap);
}

}  // namespace llmc
