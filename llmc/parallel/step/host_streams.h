// Runs a step on threads of the host. The caller performs the actions of the compute stream, another thread
// communicates, and one more transfers to and from the disk. Each thread follows the order of the list, and waits for
// the actions on which an action depends (Action::after). Transfers between stages and of the disk are only begun, and
// then tested from time to time.
#pragma once

#include <array>
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

    // A thread that performs some streams' actions.
    struct Lane {
        bool of_disk;
        std::thread thread{};          // started by the first list that has such actions
        bool is_busy = false;          // whether it works on the list
        std::vector<int> in_flight{};  // transfers in flight; only for this thread

        bool performs(const Action& action) const {
            return action.stream != StreamKind::compute && is_on_disk(action) == of_disk;
        }
    };
    bool are_busy() const;
    void lane_thread(Lane& lane);
    void perform_all(Lane& lane, Lock& lock);
    void perform(Lane& lane, Lock& lock, int place);
    void wait_and_test(Lane& lane, Lock& lock);

    bool is_done(int place) const { return done_[static_cast<std::size_t>(place)] != 0; }
    bool may_begin(const Action& action) const;
    Phase phase_of_wait(const Step& step, const Action& action) const;
    bool see_done(const Step& step, Performer& performer, std::vector<int>& in_flight);

    bool overlap_;
    PhaseTimes times_;
    bool watches_ = false;
    std::vector<ActionTime> action_times_;  // measured on the thread that performs the action

    std::mutex mutex_;  // guards all that follows
    std::condition_variable changed_;
    std::array<Lane, 2> lanes_{Lane{false}, Lane{true}};
    const Step* step_ = nullptr;  // the list that they work on
    Performer* performer_ = nullptr;
    std::vector<char> done_;  // by position in the list: whether the action is done
    bool cancelled_ = false;
    bool stops_ = false;
    std::exception_ptr fault_;  // thrown by an action of a lane
};

}  // namespace llmc
