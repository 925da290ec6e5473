#include "llmc/data/samples.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>

#include "llmc/core/error.h"
#include "llmc/core/random.h"
#include "llmc/device/ops.h"

namespace llmc {
namespace {

// Fills the inputs and the targets of a row, and pads them.
void read_row(const TokenSource& source, const Row& row, std::span<std::int32_t> inputs,
              std::span<std::int32_t> targets) {
    const auto real = static_cast<std::size_t>(row.tokens - 1);
    check(real <= inputs.size() && inputs.size() == targets.size(), "a row fits the sequence");
    source.read(row.shard, row.first, inputs.first(real));
    source.read_targets(row.shard, row.first + 1, targets.first(real));
    std::ranges::fill(inputs.subspan(real), 0);
    std::ranges::fill(targets.subspan(real), ignored_target);
}

// The shard of a window, given the number of each shard's first window.
std::size_t shard_of(const std::vector<std::int64_t>& first_window, std::int64_t window) {
    check(window >= 0 && window < first_window.back(), "a window is inside the source");
    return static_cast<std::size_t>(std::ranges::upper_bound(first_window, window) - first_window.begin()) -
           1;
}

}  // namespace

Permutation::Permutation(std::uint64_t seed, std::int64_t size)
    : seed_(seed), size_(static_cast<std::uint64_t>(size)) {
    check(size > 0, "a permutation has at least one element");
    half_bits_ = (static_cast<int>(std::bit_width(size_ - 1)) + 1) / 2;
}

// A Feistel network: a bijection of the numbers of 2 * half_bits_ bits, for any round function. If the halves
// have many values, four rounds of a random function cannot be told from a random bijection (Luby and
// Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988). If they have few
// values, fewer than eight rounds make some orders clearly more likely than others.
std::uint64_t Permutation::shuffle(std::uint64_t x) const {
    constexpr std::uint64_t rounds = 8;
    const RandomStream random(seed_, "permutation");
    const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
    std::uint64_t left = x >> half_bits_, right = x & mask;
    for (std::uint64_t round = 0; round < rounds; ++round) {
        const std::uint64_t mixed = left ^ (random.bits((round << 32) | right) & mask);
        left = right;
        right = mixed;
    }
    return (left << half_bits_) | right;
}

// If the network leads outside 0 ... size-1, it is applied again until the result is inside (cycle walking):
// the orbit returns to its start at the latest. There are fewer than 4 * size numbers, so this takes fewer
// than 4 steps on average.
std::int64_t Permutation::operator()(std::int64_t index) const {
    check(index >= 0 && static_cast<std::uint64_t>(index) < size_, "an index of the permutation");
    std::uint64_t x = shuffle(static_cast<std::uint64_t>(index));
    while (x >= size_) x = shuffle(x);
    return static_cast<std::int64_t>(x);
}

std::int64_t training_windows(const TokenSource& source, std::int64_t sequence_length) {
    if (!source.rows().empty()) return std::ssize(source.rows());
    std::int64_t windows = 0;
    for (std::size_t shard = 0; shard < source.shards(); ++shard)
        windows += (source.tokens(shard) - 1) / sequence_length;
    return windows;
}

TrainingSamples::TrainingSamples(const TokenSource& source, std::int64_t sequence_length, std::uint64_t seed)
    : source_(source), sequence_length_(sequence_length), seed_(seed), first_window_{0} {
    if (has_rows()) first_window_.push_back(std::ssize(source.rows()));
    for (std::size_t shard = 0; shard < source.shards() && !has_rows(); ++shard) {
        const std::int64_t pairs = std::max<std::int64_t>(source.tokens(shard) - 1, 0);
        first_window_.push_back(first_window_.back() + pairs / sequence_length);
    }
}

std::uint64_t TrainingSamples::epoch_seed(std::int64_t sample) const {
    check(sample >= 0 && windows() > 0, "samples count from 0, in a source of at least one window");
    return RandomStream(seed_, "epoch").bits(static_cast<std::uint64_t>(sample / windows()));
}

std::int64_t TrainingSamples::place(std::int64_t sample, std::uint64_t epoch_seed) const {
    return Permutation(epoch_seed, windows())(sample % windows());
}

const Row& TrainingSamples::row(std::int64_t sample) const {
    return source_.rows()[static_cast<std::size_t>(place(sample, epoch_seed(sample)))];
}

std::int64_t TrainingSamples::targets(std::int64_t first, std::int64_t samples) const {
    if (!has_rows()) return samples * sequence_length_;
    std::int64_t targets = 0;
    for (std::int64_t i = 0; i < samples; ++i) targets += row(first + i).targets;
    return targets;
}

TrainingSamples::Window TrainingSamples::window(std::int64_t sample) const {
    check(!has_rows(), "a sample of rows is no window");
    const std::uint64_t epoch_seed = this->epoch_seed(sample);
    const std::int64_t window = place(sample, epoch_seed);
    const std::size_t shard = shard_of(first_window_, window);
    const std::int64_t left_over = (source_.tokens(shard) - 1) % sequence_length_;
    const std::uint64_t phase =
        RandomStream(epoch_seed, "phase").below(shard, static_cast<std::uint64_t>(left_over) + 1);
    return {shard, static_cast<std::int64_t>(phase) + (window - first_window_[shard]) * sequence_length_};
}

void TrainingSamples::read(std::int64_t sample, std::span<std::int32_t> inputs,
                           std::span<std::int32_t> targets) const {
    check(std::ssize(inputs) == sequence_length_ && inputs.size() == targets.size(),
          "T inputs and T targets");
    if (has_rows()) return read_row(source_, row(sample), inputs, targets);
    const auto [shard, first] = window(sample);
    source_.read(shard, first, inputs);
    source_.read(shard, first + 1, targets);
}

ValidationWindows::ValidationWindows(const TokenSource& source, std::int64_t sequence_length)
    : source_(source), sequence_length_(sequence_length), first_window_{0} {
    if (!source.rows().empty()) {
        first_window_.push_back(std::ssize(source.rows()));
        return;
    }
    for (std::size_t shard = 0; shard < source.shards(); ++shard) {
        const std::int64_t targets = source.tokens(shard) - 1;
        first_window_.push_back(first_window_.back() + (targets + sequence_length - 1) / sequence_length);
    }
}

std::int64_t ValidationWindows::targets(std::int64_t windows) const {
    check(windows >= 0 && windows <= this->windows(), "windows of the source");
    std::int64_t targets = 0;
    if (!source_.rows().empty()) {
        for (const Row& row : source_.rows().first(static_cast<std::size_t>(windows))) targets += row.targets;
        return targets;
    }
    for (std::size_t shard = 0; shard < source_.shards() && first_window_[shard] < windows; ++shard) {
        targets += std::min(source_.tokens(shard) - 1, (windows - first_window_[shard]) * sequence_length_);
    }
    return targets;
}

void ValidationWindows::read(std::int64_t window, std::span<std::int32_t> inputs,
                             std::span<std::int32_t> targets) const {
    check(std::ssize(inputs) == sequence_length_ && inputs.size() == targets.size(),
          "T inputs and T targets");
    if (!source_.rows().empty())
        return read_row(source_, source_.rows()[static_cast<std::size_t>(window)], inputs, targets);
    const std::size_t shard = shard_of(first_window_, window);
    const std::int64_t first = (window - first_window_[shard]) * sequence_length_;
    const auto real = static_cast<std::size_t>(std::min(sequence_length_, source_.tokens(shard) - 1 - first));
    source_.read(shard, first, inputs.first(real));
    source_.read(shard, first + 1, targets.first(real));
    std::ranges::fill(inputs.subspan(real), 0);
    std::ranges::fill(targets.subspan(real), ignored_target);
}

std::string ValidationWindows::fingerprint(std::int64_t windows) const {
    const auto length = static_cast<std::size_t>(sequence_length_);
    std::vector<std::int32_t> inputs(length), targets(length);
    auto hash = static_cast<XXH64_hash_t>(sequence_length_);
    for (std::int64_t window = 0; window < windows; ++window) {
        read(window, inputs, targets);
        for (const std::vector<std::int32_t>* tokens : {&inputs, &targets})
            hash = XXH3_64bits_withSeed(tokens->data(), tokens->size() * sizeof(std::int32_t), hash);
    }
    return fmt::format("{:016x}", hash);
}

}  // namespace llmc
