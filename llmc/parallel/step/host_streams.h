// The threads of a device without streams. The caller performs the actions of the compute stream; of the other two, the
// lanes, one communicates and one transfers to and from the disk. Each thread follows the order of the list, and waits
// for the actions on which an action depends (Action::after). Transfers between stages and of the disk are only begun,
// and then tested from time to time.
#pragma once

#include <array>
#include <chrono>
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

    void begin(const Step& step, const Perform& perform) override;
    bool is_on_lane(const Action& action) const override {
        return has_lanes_ && action.stream != StreamKind::compute;
    }
    void wait_before(int place) override;
    void record(int place, TransferTest test) override;
    void finish() override;
    void cancel() override;
    // The caller's times.
    PhaseTimes times() override { return times_; }
    void watch_actions(bool on) override { watches_ = on; }
    std::span<const ActionTime> action_times() override { return action_times_; }

  private:
    using Lock = std::unique_lock<std::mutex>;

    // A thread that performs some streams' actions.
    struct Lane {
        bool of_disk;
        std::thread thread{};               // started by the first list that has such actions
        bool is_busy = false;               // whether it works on the list
        std::vector<InFlight> in_flight{};  // only for this thread

        bool performs(const Action& action) const {
            return action.stream != StreamKind::compute && is_on_disk(action) == of_disk;
        }
    };
    void lane_thread(Lane& lane);
    void perform_all(Lane& lane, Lock& lock);
    template <class F>
    void wait_as_caller(Lock& lock, bool for_disk, const F& is_met);
    template <class F>
    void wait(Lock& lock, std::vector<InFlight>& in_flight, const F& is_met);
    bool see_done(std::vector<InFlight>& in_flight);
    void note_performed(int place, TransferTest test, std::vector<InFlight>& in_flight);
    void note_begin(int place);
    void note_end(int place);

    const Action& action_at(int place) const { return step_->actions[static_cast<std::size_t>(place)]; }
    bool is_done(int place) const { return done_[static_cast<std::size_t>(place)] != 0; }
    bool may_begin(int place) const;
    bool is_waiting_for_disk(int place) const;

    bool overlap_;
    bool has_lanes_ = false;                       // for this list
    std::vector<InFlight> in_flight_;              // the caller's, without lanes
    std::chrono::steady_clock::time_point begun_;  // when the caller began its action
    PhaseTimes times_;
    bool watches_ = false;
    std::vector<ActionTime> action_times_;  // measured on the thread that performs the action

    std::mutex mutex_;  // guards all that follows
    std::condition_variable changed_;
    std::array<Lane, 2> lanes_{Lane{false}, Lane{true}};
    const Step* step_ = nullptr;  // the list that runs
    const Perform* perform_ = nullptr;
    std::vector<char> done_;  // by position in the list: whether the action is done
    bool cancelled_ = false;
    bool stops_ = false;
    std::exception_ptr fault_;  // thrown by an action of a lane
};

}  // namespace llmc
