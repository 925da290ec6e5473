// Runs the two threads of a step, which tell each other which actions are done.
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
    if (!thread_.joinable()) return;
    {
        const Lock lock(mutex_);
        stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void HostStreams::run(const Step& step, Performer& performer) {
    times_ = {};
    action_times_.assign(watches_ ? step.actions.size() : 0, {});
    if (!overlap_ || !communicates(step)) return run_alone(step, performer);
    begin(step, performer);
    try {
        compute(step, performer);
        timed(times_[Phase::communication], [&] {
            Lock lock(mutex_);
            changed_.wait(lock, [&] { return communicated_ || fault_; });
            if (fault_) std::rethrow_exception(fault_);
        });
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

// Tests the transfers in flight. Returns whether any has ended since.
bool HostStreams::see_done(const Step& step, Performer& performer) {
    return std::erase_if(in_flight_, [&](int place) {
               if (!performer.is_done(action_at(step, place))) return false;
               note_end(place);
               done_[static_cast<std::size_t>(place)] = 1;
               return true;
           }) > 0;
}

void HostStreams::run_alone(const Step& step, Performer& performer) {
    done_.assign(step.actions.size(), 0);
    in_flight_.clear();
    const auto wait_for = [&](const auto& condition) {
        while (!condition()) {
            if (!see_done(step, performer)) std::this_thread::sleep_for(nap);
        }
    };
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = action_at(step, place);
        if (!may_begin(action))
            timed(times_[Phase::communication], [&] { wait_for([&] { return may_begin(action); }); });
        timed(times_[phase_of(action.kind)], [&] { perform(action, place, performer); });
        if (is_between_stages(action.kind)) {
            in_flight_.push_back(place);
        } else {
            done_[static_cast<std::size_t>(place)] = 1;
        }
    }
    if (!in_flight_.empty())
        timed(times_[Phase::communication], [&] { wait_for([&] { return in_flight_.empty(); }); });
}

void HostStreams::begin(const Step& step, Performer& performer) {
    {
        const Lock lock(mutex_);
        step_ = &step;
        performer_ = &performer;
        done_.assign(step.actions.size(), 0);
        in_flight_.clear();
        communicated_ = cancelled_ = false;
        fault_ = nullptr;
    }
    changed_.notify_all();
    if (!thread_.joinable()) thread_ = std::thread([this] { communication_thread(); });
}

void HostStreams::compute(const Step& step, Performer& performer) {
    for (int place = 0; place < std::ssize(step.actions); ++place) {
        const Action& action = action_at(step, place);
        if (action.stream != StreamKind::compute) continue;
        timed(times_[Phase::communication], [&] {
            Lock lock(mutex_);
            changed_.wait(lock, [&] { return may_begin(action) || fault_; });
            if (fault_) std::rethrow_exception(fault_);
        });
        timed(times_[phase_of(action.kind)], [&] { perform(action, place, performer); });
        {
            const Lock lock(mutex_);
            done_[static_cast<std::size_t>(place)] = 1;
        }
        changed_.notify_all();
    }
}

// Waits until the communication thread has left the list. If it has not finished, it leaves at its next
// action.
void HostStreams::end() {
    Lock lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return step_ == nullptr; });
}

void HostStreams::communication_thread() {
    // Lower priority: if all cores compute, this thread would delay one compute thread, and the others would
    // wait for that one. Most communication, the sums of gradients, is needed only at the end of the backward
    // pass.
    setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 10);
    Lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return stops_ || step_ != nullptr; });
        if (stops_) return;
        try {
            communicate(lock);
            communicated_ = true;
        } catch (...) {
            if (!lock) lock.lock();
            fault_ = std::current_exception();
        }
        step_ = nullptr;
        changed_.notify_all();
    }
}

void HostStreams::communicate(Lock& lock) {
    for (int place = 0; place < std::ssize(step_->actions); ++place) {
        const Action& action = action_at(*step_, place);
        if (action.stream == StreamKind::compute) continue;
        while (!may_begin(action) && !cancelled_) wait_and_test(lock);
        if (cancelled_) return;
        communicate(lock, place);
    }
    while (!in_flight_.empty() && !cancelled_) wait_and_test(lock);
}

void HostStreams::communicate(Lock& lock, int place) {
    const Action& action = action_at(*step_, place);
    lock.unlock();
    perform(action, place, *performer_);
    lock.lock();
    if (is_between_stages(action.kind)) {
        in_flight_.push_back(place);
    } else {
        done_[static_cast<std::size_t>(place)] = 1;
        changed_.notify_all();
    }
}

// Waits for a change, and tests the transfers in flight.
void HostStreams::wait_and_test(Lock& lock) {
    if (in_flight_.empty()) {
        changed_.wait(lock);
        return;
    }
    // Only this thread uses the list of transfers. `done_` is written under the lock.
    if (see_done(*step_, *performer_)) {
        changed_.notify_all();
    } else {
        changed_.wait_for(lock, nap);
    }
}

}  // namespace llmc
