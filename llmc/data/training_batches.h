// Reads the training micro-batches of a data-parallel rank in a separate thread, some micro-batches ahead, so
// that a step does not wait for a disk. samples.h decides which samples these are.
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
    // `samples` must outlive the object. After the first call of read(), the thread keeps `ahead`
    // micro-batches in memory, which takes 8 bytes per token (input and target).
    TrainingBatches(const TrainingSamples& samples, const BatchShare& share, std::int64_t sequence_length,
                    int ahead = 4);
    ~TrainingBatches();
    TrainingBatches(const TrainingBatches&) = delete;
    TrainingBatches& operator=(const TrainingBatches&) = delete;

    // Fills inputs and targets, (micro_batch, T) each, with a micro-batch of the step that begins with sample
    // `step_first`. The index after the step's last micro-batch means the first of the next step. The
    // micro-batch that follows the previous request has been read or is being read; the caller waits for any
    // other. A UserError of reading is thrown here, for the micro-batch that it concerns.
    void read(std::int64_t step_first, std::int64_t index, std::span<std::int32_t> inputs,
              std::span<std::int32_t> targets);

    // The targets that count in the step, over all ranks.
    std::int64_t targets(std::int64_t step_first) const {
        return samples_.targets(step_first, share_.global_sequences);
    }
    // Whether some do not count.
    bool has_rows() const { return samples_.has_rows(); }

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

    Place normalized(Place place) const;
    Slot& slot(std::size_t from_oldest) { return slots_[(oldest_ + from_oldest) % slots_.size()]; }
    void fill(Slot& slot) const;
    void read_ahead();

    const TrainingSamples& samples_;
    BatchShare share_;
    std::size_t sequence_length_;

    std::mutex mutex_;  // for all members below, except slots that are being filled or copied
    std::condition_variable changed_;
    std::vector<Slot> slots_;              // a ring
    std::size_t oldest_ = 0, filled_ = 0;  // in the ring
    // Whether the thread is filling a slot, and whether it may fill the next one.
    bool filling_ = false, begun_ = false;
    bool stops_ = false;
    Place next_{};  // the next one that the thread reads
    std::thread thread_;
};

}  // namespace llmc
