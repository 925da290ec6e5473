// Saves a checkpoint beside training: a thread of each process writes its files from a copy, and when all have, one of
// rank 0 completes the checkpoint. The threads do not communicate. The processes learn of each other by the question at
// the end of each step (Session::ask_to_stop).
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/io/checkpoint.h"
#include "llmc/parallel/zero/checkpoint_share.h"
#include "llmc/train/session.h"

namespace llmc {

class BackgroundSave {
  public:
    // Begins to write what was copied. `world` and the copy outlive it. All ranks make one.
    BackgroundSave(CheckpointSave save, const CheckpointCopy& copy, Communicator& world);
    // Stops writing, and waits for it.
    ~BackgroundSave();
    BackgroundSave(const BackgroundSave&) = delete;
    BackgroundSave& operator=(const BackgroundSave&) = delete;

    const CheckpointSave& of() const { return save_; }

    // Whether this rank has done its part of what is being done, and how.
    Session::Done done() const;
    // With the sums over all ranks: goes on to what comes next. True when the checkpoint is complete. All ranks call it
    // with the same sums. SharedError if a rank could not write; then nothing is left of the checkpoint.
    bool advance(const Session::Done& sums);
    // Waits until the checkpoint is complete. All ranks call it. SharedError as above.
    void wait();

  private:
    // Begins what is done next; does it if no thread is to be had.
    void start(const std::function<void()>& work);

    CheckpointSave save_;
    Communicator& world_;
    std::atomic<bool> is_cancelled_ = false;
    bool is_completing_ = false;
    std::shared_future<std::string> work_;  // the error; empty: none
};

}  // namespace llmc
