#include "llmc/parallel/host_streams.h"

#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

namespace llmc {

namespace {

constexpr int past_all = std::numeric_limits<int>::max();

// Adds the time a piece of work takes to a phase.
template <class Work>
void timed(double& milliseconds, const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    milliseconds +=
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

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

void HostStreams::run(const Step& step, const Perform& perform) {
    times_ = {};
    if (!overlap_ || !communicates(step)) {
        for (const Action& action : step.actions) {
            timed(times_[phase_of(action.kind)], [&] { perform(action); });
        }
        return;
    }
    begin(step, perform);
    try {
        compute(step, perform);
        timed(times_[Phase::communication], [&] { wait_for_communication(past_all - 1); });
    } catch (...) {
        end();
        throw;
    }
    end();
}

void HostStreams::begin(const Step& step, const Perform& perform) {
    {
        const Lock lock(mutex_);
        step_ = &step;
        perform_ = &perform;
        computed_ = communicated_ = 0;
        cancelled_ = false;
        fault_ = nullptr;
    }
    changed_.notify_all();
    if (!thread_.joinable()) thread_ = std::thread([this] { communication_thread(); });
}

void HostStreams::compute(const Step& step, const Perform& perform) {
    for (int i = 0; i < std::ssize(step.actions); ++i) {
        const Action& action = step.actions[static_cast<std::size_t>(i)];
        if (action.stream != StreamKind::compute) continue;
        timed(times_[Phase::communication], [&] { wait_for_communication(action.after); });
        timed(times_[phase_of(action.kind)], [&] { perform(action); });
        {
            const Lock lock(mutex_);
            computed_ = i + 1;
        }
        changed_.notify_all();
    }
}

// Until the communication at `place` is done. Throws what stopped the communication.
void HostStreams::wait_for_communication(int place) {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return communicated_ > place || fault_; });
    if (fault_) std::rethrow_exception(fault_);
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
        communicate(lock);
        step_ = nullptr;
        changed_.notify_all();
    }
}

void HostStreams::communicate(Lock& lock) {
    for (int i = 0; i < std::ssize(step_->actions); ++i) {
        const Action& action = step_->actions[static_cast<std::size_t>(i)];
        if (action.stream != StreamKind::communication) continue;
        changed_.wait(lock, [&] { return cancelled_ || computed_ > action.after; });
        if (cancelled_) return;
        lock.unlock();
        std::exception_ptr fault;
        try {
            (*perform_)(action);
        } catch (...) {
            fault = std::current_exception();
        }
        lock.lock();
        fault_ = std::move(fault);
        communicated_ = i + 1;
        changed_.notify_all();
        if (fault_) return;
    }
    communicated_ = past_all;
    changed_.notify_all();
}

}  // namespace llmc
