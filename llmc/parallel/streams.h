// The two streams of a step as two threads that walk one list: the caller performs the actions of the compute
// stream, a thread of its own those of the communication stream, each when what it depends on is done
// (Action::after).
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "llmc/parallel/phase.h"
#include "llmc/parallel/step.h"

namespace llmc {

class Streams {
  public:
    // Without `overlap` the caller performs all actions, in the order of the list.
    explicit Streams(bool overlap) : overlap_(overlap) {}
    ~Streams();
    Streams(const Streams&) = delete;
    Streams& operator=(const Streams&) = delete;

    using Perform = std::function<void(const Action&)>;
    // Performs the whole list; returns where the caller's time went. What an action throws is thrown here, on
    // either thread, once the other thread has finished the action it is at.
    PhaseTimes run(const Step& step, const Perform& perform);

  private:
    using Lock = std::unique_lock<std::mutex>;

    void begin(const Step& step, const Perform& perform);
    void compute(const Step& step, const Perform& perform, PhaseTimes& times);
    void wait_for_communication(int place);
    void end();

    void communication_thread();
    void communicate(Lock& lock);

    bool overlap_;
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
