// The two streams of a step as two threads that walk one list: the caller performs the actions of the compute
// stream, a thread of its own those of the communication stream, each when what it depends on is done
// (Action::after).
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "llmc/parallel/step_streams.h"

namespace llmc {

class HostStreams final : public StepStreams {
  public:
    // Without `overlap` the caller performs all actions, in the order of the list.
    explicit HostStreams(bool overlap) : overlap_(overlap) {}
    ~HostStreams() override;
    HostStreams(const HostStreams&) = delete;
    HostStreams& operator=(const HostStreams&) = delete;

    // What an action throws is thrown here, on either thread, once the other thread has finished the action it is
    // at.
    void run(const Step& step, const Perform& perform) override;
    // Of the caller.
    PhaseTimes times() override { return times_; }

  private:
    using Lock = std::unique_lock<std::mutex>;

    void begin(const Step& step, const Perform& perform);
    void compute(const Step& step, const Perform& perform);
    void wait_for_communication(int place);
    void end();

    void communication_thread();
    void communicate(Lock& lock);

    bool overlap_;
    PhaseTimes times_;
    std::thread thread_;  // started by the first list that communicates

    std::mutex mutex_;  // of all that follows
    std::condition_variable changed_;
    const Step* step_ = nullptr;  // what the communication thread walks; none when it is through
    const Perform* perform_ = nullptr;
    int computed_ = 0;      // actions of the compute stream before this place in the list are done
    int communicated_ = 0;  // those of the communication stream
    bool cancelled_ = false;
    bool stops_ = false;
    std::exception_ptr fault_;  // what a communication action threw
};

}  // namespace llmc
