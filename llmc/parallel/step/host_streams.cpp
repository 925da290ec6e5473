// The threads of a step tell each other which actions are done.
#include "llmc/parallel/step/host_streams.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace llmc {

namespace {

// The time between two tests of whether transfers are done.
constexpr std::chrono::microseconds nap{50};

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double seconds_now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

}  // namespace

HostStreams::~HostStreams() {
    {
        const Lock lock(mutex_);
        stops_ = true;
    }
    changed_.notify_all();
    for (Lane& lane : lanes_)
        if (lane.thread.joinable()) lane.thread.join();
}

void HostStreams::begin(const Step& step, const Perform& perform) {
    {
        const Lock lock(mutex_);
        step_ = &step;
        perform_ = &perform;
        done_.assign(step.actions.size(), 0);
        times_ = {};
        action_times_.assign(watches_ ? step.actions.size() : 0, {});
        cancelled_ = false;
        fault_ = nullptr;
        in_flight_.clear();
        has_lanes_ = overlap_ && has_streams(step);
        if (!has_lanes_) return;
        for (Lane& lane : lanes_) {
            lane.in_flight.clear();
            lane.is_busy = std::ranges::any_of(step.actions,
                                               [&](const Action& action) { return lane.performs(action); });
            if (lane.is_busy && !lane.thread.joinable())
                lane.thread = std::thread([this, &lane] { lane_thread(lane); });
        }
    }
    changed_.notify_all();
}

void HostStreams::wait_before(int place) {
    Lock lock(mutex_);
    wait_as_caller(lock, is_waiting_for_disk(place), [&] { return may_begin(place); });
    note_begin(place);
    begun_ = Clock::now();
}

void HostStreams::record(int place, TransferTest test) {
    times_[phase_of(action_at(place).kind)] += milliseconds_since(begun_);
    note_end(place);
    {
        const Lock lock(mutex_);
        note_performed(place, std::move(test), in_flight_);
    }
    if (has_lanes_) changed_.notify_all();
}

void HostStreams::finish() {
    Lock lock(mutex_);
    if (!in_flight_.empty())
        wait_as_caller(lock, is_on_disk(action_at(in_flight_.back().place)),
                       [&] { return in_flight_.empty(); });
    for (const Lane& lane : lanes_) wait_as_caller(lock, lane.of_disk, [&] { return !lane.is_busy; });
}

// A lane that has not finished the list leaves it at its next action.
void HostStreams::cancel() {
    Lock lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return std::ranges::none_of(lanes_, &Lane::is_busy); });
}

// The time counts to the phase for which the caller waits.
template <class F>
void HostStreams::wait_as_caller(Lock& lock, bool for_disk, const F& is_met) {
    if (!is_met()) {
        const Clock::time_point start = Clock::now();
        wait(lock, in_flight_, is_met);
        times_[for_disk ? Phase::disk : Phase::communication] += milliseconds_since(start);
    }
    if (fault_) std::rethrow_exception(fault_);
}

void HostStreams::lane_thread(Lane& lane) {
    // Lower priority: if all cores compute, this thread would delay one compute thread, and the others would
    // wait for that one. Most communication, the sums of gradients, is needed only at the end of the backward
    // pass.
    setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 10);
    Lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return stops_ || lane.is_busy; });
        if (stops_) return;
        try {
            perform_all(lane, lock);
        } catch (...) {
            if (!lock) lock.lock();
            if (!fault_) fault_ = std::current_exception();
            cancelled_ = true;
        }
        lane.is_busy = false;
        changed_.notify_all();
    }
}

void HostStreams::perform_all(Lane& lane, Lock& lock) {
    for (int place = 0; place < std::ssize(step_->actions); ++place) {
        const Action& action = action_at(place);
        if (!lane.performs(action)) continue;
        wait(lock, lane.in_flight, [&] { return may_begin(place); });
        if (cancelled_) return;
        lock.unlock();
        note_begin(place);
        TransferTest test = (*perform_)(action);
        note_end(place);
        lock.lock();
        note_performed(place, std::move(test), lane.in_flight);
        changed_.notify_all();
    }
    wait(lock, lane.in_flight, [&] { return lane.in_flight.empty(); });
}

// Waits for a change until a condition is met or the list is cancelled, and tests this thread's transfers in flight.
template <class F>
void HostStreams::wait(Lock& lock, std::vector<InFlight>& in_flight, const F& is_met) {
    while (!is_met() && !cancelled_) {
        if (in_flight.empty()) {
            changed_.wait(lock);
        } else if (see_done(in_flight)) {
            changed_.notify_all();
        } else {
            changed_.wait_for(lock, nap);
        }
    }
}

// Tests transfers. Returns whether any has ended since. Those of the disk, which end in any order, count as done in the
// order of their stream, on which others rely.
bool HostStreams::see_done(std::vector<InFlight>& in_flight) {
    std::array<bool, all_streams.size()> has_earlier{};
    return std::erase_if(in_flight, [&](const InFlight& transfer) {
               const Action& action = action_at(transfer.place);
               bool& waits = has_earlier[static_cast<std::size_t>(action.stream)];
               if ((is_on_disk(action) && waits) || !transfer.is_done()) {
                   waits = true;
                   return false;
               }
               note_end(transfer.place);
               done_[static_cast<std::size_t>(transfer.place)] = 1;
               return true;
           }) > 0;
}

void HostStreams::note_performed(int place, TransferTest test, std::vector<InFlight>& in_flight) {
    if (is_begun_only(action_at(place))) {
        in_flight.push_back({place, std::move(test)});
    } else {
        done_[static_cast<std::size_t>(place)] = 1;
    }
}

void HostStreams::note_begin(int place) {
    if (watches_) action_times_[static_cast<std::size_t>(place)].begin = seconds_now();
}

void HostStreams::note_end(int place) {
    if (watches_) action_times_[static_cast<std::size_t>(place)].end = seconds_now();
}

bool HostStreams::may_begin(int place) const {
    return std::ranges::all_of(action_at(place).after, [&](int after) { return is_done(after); });
}

bool HostStreams::is_waiting_for_disk(int place) const {
    return std::ranges::any_of(action_at(place).after,
                               [&](int after) { return !is_done(after) && is_on_disk(action_at(after)); });
}

}  // namespace llmc
