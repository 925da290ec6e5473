// The order of samples. Every window comes once an epoch, each time in another order, for any shards.
// Validation predicts every token once.
#include "llmc/data/samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/device/ops.h"
#include "test/unit/numbered_source.h"

namespace llmc {
namespace {

struct Sample {
    std::vector<std::int32_t> inputs, targets;
};

template <class Source>
Sample read(const Source& source, std::int64_t index, std::size_t T) {
    Sample sample{std::vector<std::int32_t>(T, -7), std::vector<std::int32_t>(T, -7)};
    source.read(index, sample.inputs, sample.targets);
    return sample;
}

std::vector<std::int64_t> values(const Permutation& permutation, std::int64_t size) {
    std::vector<std::int64_t> values;
    for (std::int64_t i = 0; i < size; ++i) values.push_back(permutation(i));
    return values;
}

TEST(Permutation, IsABijection) {
    for (std::int64_t size = 1; size <= 300; ++size) {
        for (const std::uint64_t seed : {0, 1, 2}) {
            std::vector<std::int64_t> sorted = values({seed, size}, size);
            std::ranges::sort(sorted);
            for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(sorted[static_cast<std::size_t>(i)], i) << size;
        }
    }
}

TEST(Permutation, DiffersBySeed) {
    for (std::int64_t size = 20; size <= 300; ++size) {
        EXPECT_NE(values({1, size}, size), values({2, size}, size)) << size;
        std::vector<std::int64_t> in_order(static_cast<std::size_t>(size));
        std::iota(in_order.begin(), in_order.end(), 0);
        EXPECT_NE(values({1, size}, size), in_order) << size;
    }
}

// Each value is equally likely at each place, for sizes below, at and above powers of four.
TEST(Permutation, IsUniform) {
    constexpr int seeds = 20000;
    for (const std::int64_t size : {2, 3, 4, 5, 6, 16, 17}) {
        std::map<std::pair<std::int64_t, std::int64_t>, int> counts;
        for (int seed = 0; seed < seeds; ++seed) {
            const Permutation permutation(static_cast<std::uint64_t>(seed), size);
            for (std::int64_t i = 0; i < size; ++i) ++counts[{i, permutation(i)}];
        }
        // Binomial counts: one count in a billion is beyond six standard deviations.
        const double p = 1.0 / static_cast<double>(size), mean = seeds * p,
                     deviation = std::sqrt(seeds * p * (1 - p));
        EXPECT_EQ(std::ssize(counts), size * size);
        for (const auto& [place, count] : counts) EXPECT_NEAR(count, mean, 6 * deviation) << size;
    }
}

TEST(Permutation, TakesLargeSizes) {
    for (const std::int64_t size :
         {(std::int64_t{1} << 40) - 1, (std::int64_t{1} << 40) + 1, std::int64_t{1} << 62}) {
        const Permutation permutation(1, size);
        std::set<std::int64_t> seen;
        for (std::int64_t i = 0; i < 1000; ++i) {
            const std::int64_t value = permutation(size - 1 - i);
            EXPECT_TRUE(value >= 0 && value < size);
            seen.insert(value);
        }
        EXPECT_EQ(seen.size(), 1000U);
        EXPECT_GT(*seen.rbegin() - *seen.begin(),
                  size / 2);  // spread out: 1000 values all in one half have p = 2^-999
    }
}

TEST(TrainingSamples, AreWindowsOfOneShard) {
    const NumberedSource source({25, 1, 8, 3, 104});
    const TrainingSamples samples(source, 8, 1);
    EXPECT_EQ(samples.windows(), 3 + 0 + 0 + 0 + 12);
    EXPECT_EQ(training_windows(source, 8), samples.windows());
    for (std::int64_t i = 0; i < 100; ++i) {
        const auto [shard, first] = samples.window(i);
        const Sample sample = read(samples, i, 8);
        for (std::int32_t t = 0; t < 8; ++t) {
            EXPECT_EQ(sample.inputs[static_cast<std::size_t>(t)],
                      1000 * static_cast<std::int32_t>(shard) + first + t);
            EXPECT_EQ(sample.targets[static_cast<std::size_t>(t)],
                      sample.inputs[static_cast<std::size_t>(t)] + 1);
        }
        EXPECT_LE(first + 9, source.tokens(shard));
    }
}

// In an epoch every target is read at most once. All but the left-over targets of each shard are read exactly
// once.
TEST(TrainingSamples, VisitEveryWindowOnceAnEpoch) {
    const NumberedSource source({25, 30, 9, 104});
    const TrainingSamples samples(source, 8, 5);
    const std::vector<std::int64_t> windows = {3, 3, 1, 12}, left_over = {0, 5, 0, 7};
    ASSERT_EQ(samples.windows(), 19);
    for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
        std::set<std::int32_t> targets;
        std::map<std::size_t, std::set<std::int64_t>> starts;
        for (std::int64_t i = 0; i < 19; ++i) {
            const Sample sample = read(samples, epoch * 19 + i, 8);
            targets.insert(sample.targets.begin(), sample.targets.end());
            const auto [shard, first] = samples.window(epoch * 19 + i);
            starts[shard].insert(first);
        }
        EXPECT_EQ(targets.size(), 19U * 8U);
        for (std::size_t shard = 0; shard < 4; ++shard) {
            // Consecutive windows, starting at the phase.
            const std::int64_t phase = *starts[shard].begin();
            EXPECT_LE(phase, left_over[shard]);
            std::set<std::int64_t> expected;
            for (std::int64_t k = 0; k < windows[shard]; ++k) expected.insert(phase + 8 * k);
            EXPECT_EQ(starts[shard], expected);
        }
    }
}

std::vector<TrainingSamples::Window> epoch_of(const TrainingSamples& samples, std::int64_t epoch) {
    std::vector<TrainingSamples::Window> windows;
    for (std::int64_t i = 0; i < samples.windows(); ++i)
        windows.push_back(samples.window(epoch * samples.windows() + i));
    return windows;
}

TEST(TrainingSamples, HaveAnOrderOfTheSeedAndTheEpoch) {
    const NumberedSource source({8 * 40 + 1});
    const TrainingSamples samples(source, 8, 1), same(source, 8, 1), other(source, 8, 2);
    EXPECT_EQ(epoch_of(samples, 0), epoch_of(same, 0));
    EXPECT_NE(epoch_of(samples, 0), epoch_of(samples, 1));
    EXPECT_NE(epoch_of(samples, 0), epoch_of(other, 0));
    EXPECT_NE(epoch_of(samples, 1), epoch_of(other, 0));  // seeds are not epochs
}

TEST(TrainingSamples, UseTheTailInSomeEpoch) {
    const NumberedSource source({8 * 3 + 1 + 7});
    const TrainingSamples samples(source, 8, 1);
    std::set<std::int64_t> phases;
    for (std::int64_t epoch = 0; epoch < 100; ++epoch) {
        std::int64_t first = source.tokens(0);
        for (const auto& window : epoch_of(samples, epoch)) first = std::min(first, window.first);
        phases.insert(first);
    }
    EXPECT_EQ(phases,
              (std::set<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));  // missed with p = 8 (7/8)^100 = 1e-5
}

// A source of exactly one batch and one token: every step reads the same windows.
TEST(TrainingSamples, RepeatASingleBatch) {
    const NumberedSource source({16 * 6 + 1});
    const TrainingSamples samples(source, 16, 3);
    const auto batch = [&](std::int64_t step) {
        std::set<std::vector<std::int32_t>> inputs;
        for (std::int64_t i = 0; i < 6; ++i) inputs.insert(read(samples, step * 6 + i, 16).inputs);
        return inputs;
    };
    EXPECT_EQ(batch(0).size(), 6U);
    for (std::int64_t step = 1; step < 10; ++step) EXPECT_EQ(batch(step), batch(0));
}

TEST(TrainingSamples, NeedAWindow) {
    EXPECT_THROW(TrainingSamples(NumberedSource({8}), 8, 1).window(0), ProgrammingError);
    EXPECT_EQ(training_windows(NumberedSource({8, 8, 8}), 8), 0);
    EXPECT_EQ(TrainingSamples(NumberedSource({9}), 8, 1).windows(), 1);
}

TEST(ValidationWindows, PredictEveryTokenOnce) {
    const std::vector<std::int64_t> lengths = {25, 1, 2, 9, 30, 17};
    const NumberedSource source(lengths);
    const ValidationWindows validation(source, 8);
    EXPECT_EQ(validation.windows(), 3 + 0 + 1 + 1 + 4 + 2);

    std::vector<std::int32_t> expected, seen;
    for (std::size_t shard = 0; shard < lengths.size(); ++shard) {
        for (std::int64_t i = 1; i < lengths[shard]; ++i)
            expected.push_back(static_cast<std::int32_t>(1000 * static_cast<std::int64_t>(shard) + i));
    }
    for (std::int64_t window = 0; window < validation.windows(); ++window) {
        EXPECT_EQ(validation.targets(window), std::ssize(seen));
        const Sample sample = read(validation, window, 8);
        for (std::size_t t = 0; t < 8; ++t) {
            if (sample.targets[t] == ignored_target) {
                EXPECT_EQ(sample.inputs[t], 0);
            } else {
                EXPECT_EQ(sample.inputs[t], sample.targets[t] - 1);
                seen.push_back(sample.targets[t]);
            }
        }
    }
    EXPECT_EQ(seen, expected);
    EXPECT_EQ(validation.targets(validation.windows()), std::ssize(expected));
}

TEST(ValidationWindows, MayBeNone) { EXPECT_EQ(ValidationWindows(NumberedSource({1, 1}), 8).windows(), 0); }

}  // namespace
}  // namespace llmc
