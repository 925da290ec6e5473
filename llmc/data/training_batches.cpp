#include "llmc/data/training_batches.h"

#include <algorithm>

#include "llmc/core/error.h"

namespace llmc {

TrainingBatches::TrainingBatches(const TrainingSamples& samples, const BatchShare& share,
                                 std::int64_t sequence_length, int ahead)
    : samples_(samples),
      share_(share),
      sequence_length_(static_cast<std::size_t>(sequence_length)),
      slots_(static_cast<std::size_t>(ahead)) {
    check(ahead > 0, "at least one micro-batch is read ahead");
    const std::size_t tokens = static_cast<std::size_t>(share.micro_batch) * sequence_length_;
    for (Slot& slot : slots_) {
        slot.inputs.resize(tokens);
        slot.targets.resize(tokens);
    }
    thread_ = std::thread([this] { read_ahead(); });
}

TrainingBatches::~TrainingBatches() {
    {
        const std::lock_guard lock(mutex_);
        stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

TrainingBatches::Place TrainingBatches::normalized(Place place) const {
    if (place.index < share_.micro_batches()) return place;
    return {place.step_first + share_.global_sequences, place.index - share_.micro_batches()};
}

void TrainingBatches::fill(Slot& slot) const {
    const std::int64_t first = share_.first_sample(slot.place.step_first, slot.place.index);
    for (std::int64_t b = 0; b < share_.micro_batch; ++b) {
        const std::size_t begin = static_cast<std::size_t>(b) * sequence_length_;
        samples_.read(first + b, std::span(slot.inputs).subspan(begin, sequence_length_),
                      std::span(slot.targets).subspan(begin, sequence_length_));
    }
}

void TrainingBatches::read_ahead() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return stops_ || (begun_ && filled_ < slots_.size()); });
        if (stops_) return;
        Slot& free = slot(filled_);
        free.place = next_;
        free.fault = nullptr;
        filling_ = true;
        lock.unlock();
        try {
            fill(free);
        } catch (...) {
            free.fault = std::current_exception();
        }
        lock.lock();
        filling_ = false;
        ++filled_;
        next_ = normalized({next_.step_first, next_.index + 1});
        changed_.notify_all();
    }
}

void TrainingBatches::read(std::int64_t step_first, std::int64_t index, std::span<std::int32_t> inputs,
                           std::span<std::int32_t> targets) {
    const Place wanted = normalized({step_first, index});
    std::unique_lock lock(mutex_);
    const Place expected = filled_ > 0 ? slot(0).place : next_;
    if (!begun_ || wanted != expected) {
        begun_ = false;
        changed_.wait(lock, [&] { return !filling_; });
        oldest_ = filled_ = 0;
        next_ = wanted;
        begun_ = true;
        changed_.notify_all();
    }
    changed_.wait(lock, [&] { return filled_ > 0; });
    Slot& oldest = slot(0);
    check(inputs.size() == oldest.inputs.size() && targets.size() == oldest.targets.size(),
          "the tokens of a micro-batch");
    lock.unlock();  // a filled slot does not change
    if (!oldest.fault) {
        std::ranges::copy(oldest.inputs, inputs.begin());
        std::ranges::copy(oldest.targets, targets.begin());
    }
    const std::exception_ptr fault = oldest.fault;
    lock.lock();
    oldest_ = (oldest_ + 1) % slots_.size();
    --filled_;
    changed_.notify_all();
    if (fault) std::rethrow_exception(fault);
}

}  // namespace llmc
