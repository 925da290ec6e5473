// Runs the threads of a step, which tell each other which actions are done.
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

// Adds the time of a piece of work to a phase.
template <class Work>
void timed(double& milliseconds, const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    milliseconds +=
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const Action& action_at(const Step& step, int place) { return step.actions[static_cast<std::size_t>(place)]; }

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

void HostStreams::run(const Step& step, Performer& performer) {
    times_ = {};
    action_times_.assign(watches_ ? step.actions.size() : 0, {});
    if (!overlap_ || !has_streams(step)) return run_alone(step, performer);
    begin(step, performer);
    try {
        compute(step, performer);
        for (const Lane& lane : lanes_) {
            timed(times_[lane.of_disk ? Phase::disk : Phase::communication], [&] {
                Lock lock(mutex_);
                changed_.wait(lock, [&] { return !lane.is_busy || fault_; });
                if (fault_) std::rethrow_exception(fault_);
            });
        }
    } catch (...) {
        end();
        throw;
    }
    end();
}

void HostStreams::perform(const Action& action, int place, Performer& performer) {
    if (watches_) action_times_[static_cast<std::size_t>(place)].begin = seconds_now();
    performer.perform(action);
    note_end(place);
}

void HostStreams::note_end(int place) {
    if (watches_) action_times_[static_cast<std::size_t>(place)].end = seconds_now();
}

bool HostStreams::may_begin(const Action& action) const {
    return std::ranges::all_of(action.after, [&](int place) { return is_done(place); });
}

// The phase of the time for which an action waits.
Phase HostStreams::phase_of_wait(const Step& step, const Action& action) const {
    const bool for_disk = std::ranges::any_of(
        action.after, [&](int place) { return !is_done(place) && is_on_disk(action_at(step, place)); });
    return for_disk ? Phase::disk : Phase::communication;
}

// Tests the transfers in flight. Returns whether any has ended since. Those of the disk, which end in any order, count
// as done in the order of their stream, on which others rely.
bool HostStreams::see_done(const Step& step, Performer& performer, std::vector<int>& in_flight) {
    std::array<bool, all_streams.size()> has_earlier{};
    return std::erase_if(in_flight, [&](int place) {
               const Action& action = action_at(step, place);
               bool& waits = has_earlier[static_cast<std::size_t>(action.stream)];
               if ((is_on_disk(action) && waits) || !performer.is_done(action)) {
                   waits = true;
                   return false;
               }
               note_end(place);
               done_[static_cast<std::size_t>(place)] = 1;
               return true;
           }) > 0;
}

void HostStreams::run_alone(const Step& step, Performer& performer) {
    done_.assign(step.actions.size(), 0);
    std::vector<int> in_flight;
    const auto wait_for = [&](const auto& condition) {
        while (!condition()) {
            if (!see_done(step, performer, in_flight)) std::this_thread::sleep_for(nap);
        }
    };
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = action_at(step, place);
        if (!may_begin(action))
            timed(times_[phase_of_wait(step, action)], [&] { wait_for([&] { return may_begin(action); }); });
        timed(times_[phase_of(action.kind)], [&] { perform(action, place, performer); });
        if (is_begun_only(action)) {
            in_flight.push_back(place);
        } else {
            done_[static_cast<std::size_t>(place)] = 1;
        }
    }
    if (in_flight.empty()) return;
    const bool for_disk = is_on_disk(action_at(step, in_flight.back()));
    timed(times_[for_disk ? Phase::disk : Phase::communication],
          [&] { wait_for([&] { return in_flight.empty(); }); });
}

void HostStreams::begin(const Step& step, Performer& performer) {
    {
        const Lock lock(mutex_);
        step_ = &step;
        performer_ = &performer;
        done_.assign(step.actions.size(), 0);
        cancelled_ = false;
        fault_ = nullptr;
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

bool HostStreams::are_busy() const { return std::ranges::any_of(lanes_, &Lane::is_busy); }

void HostStreams::compute(const Step& step, Performer& performer) {
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = action_at(step, place);
        if (action.stream != StreamKind::compute) continue;
        {
            Lock lock(mutex_);
            timed(times_[phase_of_wait(step, action)],
                  [&] { changed_.wait(lock, [&] { return may_begin(action) || fault_; }); });
            if (fault_) std::rethrow_exception(fault_);
        }
        timed(times_[phase_of(action.kind)], [&] { perform(action, place, performer); });
        {
            const Lock lock(mutex_);
            done_[static_cast<std::size_t>(place)] = 1;
        }
        changed_.notify_all();
    }
}

// Waits until the lanes have left the list. One that has not finished leaves at its next action.
void HostStreams::end() {
    Lock lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !are_busy(); });
    step_ = nullptr;
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
        const Action& action = action_at(*step_, place);
        if (!lane.performs(action)) continue;
        while (!may_begin(action) && !cancelled_) wait_and_test(lane, lock);
        if (cancelled_) return;
        perform(lane, lock, place);
    }
    while (!lane.in_flight.empty() && !cancelled_) wait_and_test(lane, lock);
}

void HostStreams::perform(Lane& lane, Lock& lock, int place) {
    const Action& action = action_at(*step_, place);
    lock.unlock();
    perform(action, place, *performer_);
    lock.lock();
    if (is_begun_only(action)) {
        lane.in_flight.push_back(place);
    } else {
        done_[static_cast<std::size_t>(place)] = 1;
        changed_.notify_all();
    }
}

// Waits for a change, and tests the transfers in flight.
void HostStreams::wait_and_test(Lane& lane, Lock& lock) {
    if (lane.in_flight.empty()) {
        changed_.wait(lock);
        return;
    }
    // Only this thread uses its list of transfers. `done_` is written under the lock.
    if (see_done(*step_, *performer_, lane.in_flight)) {
        changed_.notify_all();
    } else {
        changed_.wait_for(lock, nap);
    }
}

}  // namespace llmc
