// The micro-batches of training that a data-parallel rank computes, read by a thread of their own some micro-batches
// before they are used, so that a step does not wait for a disk. Which samples these are is samples.h' business.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "llmc/data/samples.h"

namespace llmc {

class TrainingBatches {
  public:
    // `samples` outlives it. A thread keeps `ahead` micro-batches, 8 bytes a token, once the first was asked for.
    TrainingBatches(const TrainingSamples& samples, const BatchShare& share, std::int64_t sequence_length,
                    int ahead = 4);
    ~TrainingBatches();
    TrainingBatches(const TrainingBatches&) = delete;
    TrainingBatches& operator=(const TrainingBatches&) = delete;

    // Fills inputs and targets, (micro_batch, T) each, of a micro-batch in the step that begins with sample
    // `step_first`; one behind the step's last is the next step's first. What follows the one asked for last is there or
    // on its way; any other is read while the caller waits. A UserError of reading is thrown here, for the micro-batch
    // that it is about.
    void read(std::int64_t step_first, std::int64_t index, std::span<std::int32_t> inputs,
              std::span<std::int32_t> targets);

  private:
    struct Place {
        std::int64_t step_first, index;
        bool operator==(const Place&) const = default;
    };
    struct Slot {
        Place place{};
        std::vector<std::int32_t> inputs, targets;
        std::exception_ptr fault;
    };

    Place normal(Place place) const;
    Slot& slot(std::size_t from_oldest) { return slots_[(oldest_ + from_oldest) % slots_.size()]; }
    void fill(Slot& slot) const;
    void read_ahead();

    const TrainingSamples& samples_;
    BatchShare share_;
    std::size_t sequence_length_;

    std::mutex mutex_;  // of all that follows but the slots that are being filled or copied
    std::condition_variable changed_;
    std::vector<Slot> slots_;               // a ring
    std::size_t oldest_ = 0, filled_ = 0;   // of the ring
    bool filling_ = false, begun_ = false;  // a slot, by the thread; whether it is to go on to the next
    bool stops_ = false;
    Place next_{};  // that the thread reads
    std::thread thread_;
};

}  // namespace llmc
