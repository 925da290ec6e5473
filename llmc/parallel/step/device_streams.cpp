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

// Calls f for each stream of the device that the list uses besides the compute stream.
template <class F>
void DeviceStreams::for_each_other(F&& f) {
    for (const StreamKind stream : device_streams) {
        if (stream != StreamKind::compute && is_used_[static_cast<std::size_t>(stream)]) f(stream);
    }
}

void DeviceStreams::begin(const Step& step, const Perform& /*perform*/) {
    step_ = &step;
    in_flight_.clear();
    is_awaited_.assign(step.actions.size(), false);
    is_used_.fill(false);
    for (const Action& action : step.actions) {
        for (const int place : action.after) is_awaited_[static_cast<std::size_t>(place)] = true;
        is_used_[static_cast<std::size_t>(stream_of(action))] = true;
    }
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
    if (std::ranges::any_of(step.actions, [](const Action& action) { return is_of_host(action.stream); })) {
        streams_.select(StreamKind::compute);
        streams_.record(start_);
        streams_.wait_on_host(start_);
    }
}

void DeviceStreams::wait_before(int place) {
    const Action& action = step_->actions[static_cast<std::size_t>(place)];
    const StreamKind stream = stream_of(action);
    const bool is_on_host = is_of_host(stream);
    streams_.select(is_on_host ? StreamKind::compute : stream);
    // Time for which the device is idle until the host goes on counts to what the host does.
    if (is_on_host) begin_lap(phase_of(action.kind));
    for (const int after : action.after) {
        const StreamKind other = stream_of(step_->actions[static_cast<std::size_t>(after)]);
        if (other == stream) continue;
        if (is_of_host(other)) {
            finish_transfers(after, other);
        } else if (is_on_host) {
            streams_.wait_on_host(event_after(after));
        } else {
            if (stream == StreamKind::compute) begin_lap(Phase::communication);
            streams_.wait(event_after(after));
        }
    }
    if (stream == StreamKind::compute) begin_lap(phase_of(action.kind));
    record_time(begin_events_, place);
}

void DeviceStreams::record(int place, TransferTest test) {
    const Action& action = step_->actions[static_cast<std::size_t>(place)];
    record_time(end_events_, place);
    if (is_on_disk(action)) in_flight_.push_back({place, std::move(test)});
    if (!is_of_host(action.stream) && is_awaited_[static_cast<std::size_t>(place)])
        streams_.record(event_after(place));
}

void DeviceStreams::finish() {
    const auto places = static_cast<int>(step_->actions.size());
    for (const StreamKind stream : {StreamKind::disk_in, StreamKind::disk_out})
        finish_transfers(places, stream);
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

// Waits for a stream's transfers of the disk up to a position in the list.
void DeviceStreams::finish_transfers(int last, StreamKind stream) {
    std::erase_if(in_flight_, [&](const InFlight& transfer) {
        const Action& action = step_->actions[static_cast<std::size_t>(transfer.place)];
        if (transfer.place > last || action.stream != stream) return false;
        while (!transfer.is_done()) std::this_thread::sleep_for(nap);
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
