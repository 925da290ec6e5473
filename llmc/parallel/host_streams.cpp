#include "llmc/parallel/host_streams.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace llmc {

namespace {

// Between two looks whether what was begun is done.
constexpr std::chrono::microseconds nap{50};

// Adds the time a piece of work takes to a phase.
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

// Looks after what was begun; whether anything of it is done now.
bool HostStreams::see_done(const Step& step, Performer& performer) {
    return std::erase_if(under_way_, [&](int place) {
               if (!performer.is_done(action_at(step, place))) return false;
               note_end(place);
               done_[static_cast<std::size_t>(place)] = 1;
               return true;
           }) > 0;
}

void HostStreams::run_alone(const Step& step, Performer& performer) {
    done_.assign(step.actions.size(), 0);
    under_way_.clear();
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
            under_way_.push_back(place);
        } else {
            done_[static_cast<std::size_t>(place)] = 1;
        }
    }
    if (!under_way_.empty())
        timed(times_[Phase::communication], [&] { wait_for([&] { return under_way_.empty(); }); });
}

void HostStreams::begin(const Step& step, Performer& performer) {
    {
        const Lock lock(mutex_);
        step_ = &step;
        performer_ = &performer;
        done_.assign(step.actions.size(), 0);
        under_way_.clear();
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

// Until the communication thread has left the list, at its next action if it is not through.
void HostStreams::end() {
    Lock lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return step_ == nullptr; });
}

void HostStreams::communication_thread() {
    // Where all cores compute, this thread must not take one from a team that then waits for its last member: it
    // has time until the backward pass ends.
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
        while (!may_begin(action) && !cancelled_) look(lock);
        if (cancelled_) return;
        communicate(lock, place);
    }
    while (!under_way_.empty() && !cancelled_) look(lock);
}

void HostStreams::communicate(Lock& lock, int place) {
    const Action& action = action_at(*step_, place);
    lock.unlock();
    perform(action, place, *performer_);
    lock.lock();
    if (is_between_stages(action.kind)) {
        under_way_.push_back(place);
    } else {
        done_[static_cast<std::size_t>(place)] = 1;
        changed_.notify_all();
    }
}

// Waits for a change, looking after what was begun.
void HostStreams::look(Lock& lock) {
    if (under_way_.empty()) {
        changed_.wait(lock);
        return;
    }
    // (Nobody else has these numbers; what is done is written under the lock.)
    if (see_done(*step_, *performer_)) {
        changed_.notify_all();
    } else {
        changed_.wait_for(lock, nap);
    }
}

}  // namespace llmc
