// Decides which tokens are trained on, and in which order: a pure function of (seed, number of the sample).
// The result does not depend on the number of processes or on where a run was resumed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/data/token_source.h"

namespace llmc {

// Numbers 0 ... size-1 in a random order: a bijection given by the seed. Takes O(1) memory; any value can be
// computed directly.
class Permutation {
  public:
    Permutation(std::uint64_t seed, std::int64_t size);
    std::int64_t operator()(std::int64_t index) const;

  private:
    std::uint64_t shuffle(std::uint64_t x) const;

    std::uint64_t seed_;
    std::uint64_t size_;
    int half_bits_ = 0;
};

// The number of samples in an epoch of the source: a row is one. Without rows, shard i gives (tokens_i - 1) / T of
// them, rounded down.
std::int64_t training_windows(const TokenSource& source, std::int64_t sequence_length);

// A sample is a window of T+1 consecutive tokens of one shard: its first T are the inputs, its last T the
// targets. Windows share no target. An epoch visits each window once, in its own order. Each shard has
// (tokens_i - 1) mod T tokens left over. Its first window therefore begins at a random offset from 0 to that
// number, new in each epoch.
//
// A source of rows has a sample for each of them: its tokens, then padding. Targets that do not count, and those of the
// padding, are ignored_target; the inputs of the padding are 0.
class TrainingSamples {
  public:
    // `source` must outlive the object. Without a window in it, there are no samples to read.
    TrainingSamples(const TokenSource& source, std::int64_t sequence_length, std::uint64_t seed);

    std::int64_t windows() const { return first_window_.back(); }  // in an epoch

    struct Window {
        std::size_t shard;
        std::int64_t first;  // index of the first token
        bool operator==(const Window&) const = default;
    };
    // The window of a sample; samples are numbered from 0 through all epochs.
    Window window(std::int64_t sample) const;

    // Fills T inputs and T targets.
    void read(std::int64_t sample, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;

    bool has_rows() const { return !source_.rows().empty(); }
    // The targets that count in so many samples from `first` on. They are known without reading the samples.
    std::int64_t targets(std::int64_t first, std::int64_t samples) const;

  private:
    // The number of a sample within its epoch's order, which the seed of the epoch gives.
    std::int64_t place(std::int64_t sample, std::uint64_t epoch_seed) const;
    std::uint64_t epoch_seed(std::int64_t sample) const;
    const Row& row(std::int64_t sample) const;

    const TokenSource& source_;
    std::int64_t sequence_length_;
    std::uint64_t seed_;
    std::vector<std::int64_t> first_window_;  // the number of each shard's first window, then of all windows
};

// The division of a step's samples: each data-parallel rank takes consecutive ones, and its micro-batches
// divide them in order.
struct BatchShare {
    std::int64_t global_sequences;  // in a step
    std::int64_t data_ranks = 1, data_rank = 0;
    std::int64_t micro_batch = 1;  // sequences

    std::int64_t rank_sequences() const { return global_sequences / data_ranks; }
    std::int64_t micro_batches() const { return rank_sequences() / micro_batch; }
    // The first sample of a micro-batch in the step that begins with sample `step_first`.
    std::int64_t first_sample(std::int64_t step_first, std::int64_t index) const {
        return step_first + data_rank * rank_sequences() + index * micro_batch;
    }
};

// The whole source in order: every token except the first of each shard is a target exactly once. A shard's
// last window may have fewer than T targets: the missing ones are ignored_target (-1), with input 0. A source of rows
// has a window for each.
class ValidationWindows {
  public:
    // `source` must outlive the object.
    ValidationWindows(const TokenSource& source, std::int64_t sequence_length);

    std::int64_t windows() const { return first_window_.back(); }
    // The real targets in the first `windows` windows.
    std::int64_t targets(std::int64_t windows) const;
    // Fills T inputs and T targets.
    void read(std::int64_t window, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;
    // A hash of the first `windows` windows. Losses are comparable only on the same windows.
    std::string fingerprint(std::int64_t windows) const;

  private:
    const TokenSource& source_;
    std::int64_t sequence_length_;
    std::vector<std::int64_t> first_window_;
};

}  // namespace llmc
