// The streams of a step as two threads that walk one list: the caller performs the actions of the compute
// stream, a thread of its own those of all others, in the order of the list, each when what it depends on is done
// (Action::after). It only begins what goes between stages, and looks now and then whether that is done.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "llmc/parallel/step_streams.h"

namespace llmc {

class HostStreams final : public StepStreams {
  public:
    // Without `overlap` the caller performs all actions.
    explicit HostStreams(bool overlap) : overlap_(overlap) {}
    ~HostStreams() override;
    HostStreams(const HostStreams&) = delete;
    HostStreams& operator=(const HostStreams&) = delete;

    // What an action throws is thrown here, on either thread, once the other thread has finished the action it is
    // at.
    void run(const Step& step, Performer& performer) override;
    // Of the caller.
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
    void look(Lock& lock);

    bool is_done(int place) const { return done_[static_cast<std::size_t>(place)] != 0; }
    bool may_begin(const Action& action) const;
    bool see_done(const Step& step, Performer& performer);

    bool overlap_;
    PhaseTimes times_;
    bool watches_ = false;
    std::vector<ActionTime> action_times_;  // each is of the thread that performs the action
    std::thread thread_;                    // started by the first list that communicates

    std::mutex mutex_;  // of all that follows
    std::condition_variable changed_;
    const Step* step_ = nullptr;  // what the communication thread walks; none when it is through
    Performer* performer_ = nullptr;
    std::vector<char> done_;      // whether an action is, by its place in the list
    std::vector<int> under_way_;  // what was begun between stages and is not done; of who begins it
    bool communicated_ = false;   // all that is not of the compute stream
    bool cancelled_ = false;
    bool stops_ = false;
    std::exception_ptr fault_;  // what a communication action threw
};

}  // namespace llmc
