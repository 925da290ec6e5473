// Which tokens are learned from, in which order: a pure function of (seed, number of the sample), so that
// nothing depends on how many processes there are or where a run was resumed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/data/token_source.h"

namespace llmc {

// Numbers 0 ... size-1 in a random order: a bijection made by the seed. O(1) memory; values are found in any
// order.
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

// How many samples an epoch of the source has: shard i gives (tokens_i - 1) / T of them (rounded down).
std::int64_t training_windows(const TokenSource& source, std::int64_t sequence_length);

// A sample is a window of T+1 consecutive tokens of one shard: its first T are the inputs, its last T the
// targets. Windows share no target. An epoch visits each of its windows once, in an order of its own; and
// because (tokens_i - 1) mod T tokens are left over, a shard's first window begins at 0 ... that many tokens,
// anew in each epoch.
class TrainingSamples {
  public:
    // The source outlives it and has at least one window.
    TrainingSamples(const TokenSource& source, std::int64_t sequence_length, std::uint64_t seed);

    std::int64_t windows() const { return first_window_.back(); }  // in an epoch

    struct Window {
        std::size_t shard;
        std::int64_t first;  // token
        bool operator==(const Window&) const = default;
    };
    // The window of a sample; samples count from 0 through all epochs.
    Window window(std::int64_t sample) const;

    // Fills T inputs and T targets.
    void read(std::int64_t sample, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;

  private:
    const TokenSource& source_;
    std::int64_t sequence_length_;
    std::uint64_t seed_;
    std::vector<std::int64_t> first_window_;  // of each shard, and the sum of all at the end
};

// How a step's samples are divided: each data-parallel rank has a run of them, its micro-batches one after the other.
struct BatchShare {
    std::int64_t global_sequences;  // of a step
    std::int64_t data_ranks = 1, data_rank = 0;
    std::int64_t micro_batch = 1;  // sequences

    std::int64_t rank_sequences() const { return global_sequences / data_ranks; }
    std::int64_t micro_batches() const { return rank_sequences() / micro_batch; }
    // The first sample of a micro-batch in the step that begins with sample `step_first`.
    std::int64_t first_sample(std::int64_t step_first, std::int64_t index) const {
        return step_first + data_rank * rank_sequences() + index * micro_batch;
    }
};

// The whole of a source in order: every token but the first of each shard is a target exactly once. A shard's
// last window may have fewer than T targets: the others are ignored_target (-1), with 0 as their inputs.
class ValidationWindows {
  public:
    ValidationWindows(const TokenSource& source, std::int64_t sequence_length);  // the source outlives it

    std::int64_t windows() const { return first_window_.back(); }
    // Real targets in the first `windows` windows.
    std::int64_t targets(std::int64_t windows) const;
    // Fills T inputs and T targets.
    void read(std::int64_t window, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;

  private:
    const TokenSource& source_;
    std::int64_t sequence_length_;
    std::vector<std::int64_t> first_window_;
};

}  // namespace llmc
