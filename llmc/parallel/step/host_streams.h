// Runs a step on two threads of the host. The caller performs the actions of the compute stream; the
// communication thread performs all others. Each thread follows the order of the list, and waits for the
// actions on which an action depends (Action::after). Transfers between stages are only begun, and then
// tested from time to time.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "llmc/parallel/step/step_streams.h"

namespace llmc {

class HostStreams final : public StepStreams {
  public:
    // Without `overlap` the caller performs all actions.
    explicit HostStreams(bool overlap) : overlap_(overlap) {}
    ~HostStreams() override;
    HostStreams(const HostStreams&) = delete;
    HostStreams& operator=(const HostStreams&) = delete;

    // Throws what an action throws on either thread, once the other thread has finished its current action.
    void run(const Step& step, Performer& performer) override;
    // The caller's times.
    PhaseTimes times() override { return times_; }
    void watch_actions(bool on) override { watches_ = on; }
    std::span<const ActionTime> action_times() override { return action_times_; }

  private:
    using Lock = std::unique_lock<std::mutex>;

    void perform(const Action& action, int place, Performer& performer);
    void note_end(int place);
    void run_alone(const Step& step, Performer& performer);
    void begin(const Step& step, Performer& performer);
    void compute(const Step& step, Performer& performer);
    void end();

    void communication_thread();
    void communicate(Lock& lock);
    void communicate(Lock& lock, int place);
    void wait_and_test(Lock& lock);

    bool is_done(int place) const { return done_[static_cast<std::size_t>(place)] != 0; }
    bool may_begin(const Action& action) const;
    bool see_done(const Step& step, Performer& performer);

    bool overlap_;
    PhaseTimes times_;
    bool watches_ = false;
    std::vector<ActionTime> action_times_;  // measured on the thread that performs the action
    std::thread thread_;                    // started by the first list that communicates

    std::mutex mutex_;  // guards all that follows
    std::condition_variable changed_;
    const Step* step_ =
        nullptr;  // the list that the communication thread works on; null when it has finished
    Performer* performer_ = nullptr;
    std::vector<char> done_;      // by position in the list: whether the action is done
    std::vector<int> in_flight_;  // transfers in flight; only for the thread that begins them
    bool communicated_ = false;   // whether all actions of the other streams are done
    bool cancelled_ = false;
    bool stops_ = false;
    std::exception_ptr fault_;  // thrown by a communication action
};

}  // namespace llmc
