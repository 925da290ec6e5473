// The samples that ranks of any mesh read in an epoch. Reading ahead does not change them.
#include "llmc/data/training_batches.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/device/device.h"
#include "llmc/plan/run_plan.h"
#include "test/gpt2_config.h"
#include "test/unit/numbered_source.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t T = 8;

struct Tokens {
    std::vector<std::int32_t> inputs, targets;
    bool operator==(const Tokens&) const = default;
};

Tokens read(TrainingBatches& batches, const BatchShare& share, std::int64_t step_first, std::int64_t index) {
    const auto count = static_cast<std::size_t>(share.micro_batch * T);
    Tokens tokens{std::vector<std::int32_t>(count, -7), std::vector<std::int32_t>(count, -7)};
    batches.read(step_first, index, tokens.inputs, tokens.targets);
    return tokens;
}

// The same without reading ahead.
Tokens read_now(const TrainingSamples& samples, const BatchShare& share, std::int64_t step_first,
                std::int64_t index) {
    const auto count = static_cast<std::size_t>(share.micro_batch * T), row = static_cast<std::size_t>(T);
    Tokens tokens{std::vector<std::int32_t>(count), std::vector<std::int32_t>(count)};
    for (std::int64_t b = 0; b < share.micro_batch; ++b) {
        const std::size_t begin = static_cast<std::size_t>(b) * row;
        samples.read(share.first_sample(step_first, index) + b, std::span(tokens.inputs).subspan(begin, row),
                     std::span(tokens.targets).subspan(begin, row));
    }
    return tokens;
}

// Two shards without left-over tokens. They have 48 windows: three steps of 16 sequences.
const std::vector<std::int64_t> lengths = {20 * T + 1, 28 * T + 1};

// The targets that all ranks of a mesh together read in an epoch of 48 windows, according to their plans.
// Stages and tensor-parallel ranks of one data rank read the same.
std::multiset<std::int32_t> targets_of_epoch(const TrainingSamples& samples, const Mesh& shape,
                                             std::int64_t sequences, std::int64_t micro_batch,
                                             std::int64_t epoch) {
    const std::unique_ptr<Device> device = make_cpu_device(1);
    const std::int64_t steps = samples.windows() / sequences;
    std::map<std::int64_t, std::vector<Tokens>> read_by;
    std::multiset<std::int32_t> targets;
    for (Mesh mesh = shape; mesh.rank < mesh.world(); ++mesh.rank) {
        const RunPlan plan = plan_run({.model = gpt2({2, 2, 32, T, 4000}),
                                       .mesh = mesh,
                                       .global_batch_tokens = sequences * T,
                                       .micro_batch_sequences = micro_batch},
                                      device->sizes(), 0);
        TrainingBatches batches(samples, plan.share(), T);
        std::vector<Tokens> all;
        for (std::int64_t step = epoch * steps; step < (epoch + 1) * steps; ++step) {
            for (std::int64_t i = 0; i < plan.micro_batches; ++i)
                all.push_back(read(batches, plan.share(), step * sequences, i));
        }
        const auto [place, first] = read_by.emplace(mesh.data_rank(), all);
        EXPECT_EQ(place->second, all) << "ranks of one data rank read the same";
        if (!first) continue;
        for (const Tokens& tokens : all) targets.insert(tokens.targets.begin(), tokens.targets.end());
    }
    return targets;
}

// In an epoch, every token but a shard's first is a target on exactly one data rank, on any mesh. The
// exceptions are tokens that fill no whole window: (tokens - 1) mod T at the ends of a shard, and all tokens
// of a shard with at most T.
TEST(TrainingBatches, OfAllRanksAreEachTokenOnceAnEpoch) {
    struct Sizes {
        int pipeline, data, tensor;
        std::int64_t sequences, micro_batch;
    };
    const std::vector<std::int64_t> odd = {20 * T + 1 + 5, T, 28 * T + T, 1};
    for (const auto& shards : {lengths, odd}) {
        const NumberedSource source(shards);
        const TrainingSamples samples(source, T, 3);
        ASSERT_EQ(samples.windows(), 48);
        for (const auto& [P, D, t, sequences, B] :
             {Sizes{1, 1, 1, 16, 16}, Sizes{1, 1, 1, 16, 1}, Sizes{1, 2, 1, 16, 4}, Sizes{1, 3, 1, 12, 2},
              Sizes{1, 4, 1, 16, 2}, Sizes{1, 6, 1, 24, 1}, Sizes{1, 8, 1, 16, 1}, Sizes{2, 2, 1, 16, 2},
              Sizes{2, 3, 1, 24, 2}, Sizes{2, 2, 2, 16, 4}, Sizes{1, 16, 1, 16, 1}}) {
            const Mesh mesh{.pipeline = P, .tensor = t, .sharding = {.shards = D}};
            for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
                const auto targets = targets_of_epoch(samples, mesh, sequences, B, epoch);
                const std::string where =
                    fmt::format("{} x {} x {}, {} shards, epoch {}", P, D, t, shards.size(), epoch);
                std::multiset<std::int32_t> expected;
                for (std::size_t shard = 0; shard < shards.size(); ++shard) {
                    const auto first_token = static_cast<std::int32_t>(1000 * shard);
                    const std::int64_t learned = (shards[shard] - 1) / T * T;
                    if (learned == 0) continue;
                    // Starts at the first target that this epoch learns.
                    const std::int32_t begin = *targets.lower_bound(first_token);
                    EXPECT_GE(begin, first_token + 1) << where;
                    EXPECT_LE(begin, first_token + shards[shard] - learned) << where;
                    for (std::int32_t i = 0; i < learned; ++i) expected.insert(begin + i);
                }
                EXPECT_EQ(targets, expected) << where;
            }
        }
    }
}

TEST(TrainingBatches, AreWhatIsReadWithoutThem) {
    const NumberedSource source(lengths);
    const TrainingSamples samples(source, T, 1);
    const BatchShare share{.global_sequences = 12, .data_ranks = 2, .data_rank = 1, .micro_batch = 2};
    ASSERT_EQ(share.micro_batches(), 3);
    for (const int ahead : {1, 2, 7}) {
        TrainingBatches batches(samples, share, T, ahead);
        const auto expect = [&](std::int64_t step_first, std::int64_t index) {
            EXPECT_EQ(read(batches, share, step_first, index), read_now(samples, share, step_first, index))
                << ahead << ": " << step_first << ", " << index;
        };
        for (std::int64_t step = 0; step < 10; ++step)
            for (std::int64_t i = 0; i < 3; ++i) expect(12 * step, i);
        // The next step's first micro-batch, given as micro-batch 3 of the step before; then the one after
        // it.
        EXPECT_EQ(read(batches, share, 108, 3), read_now(samples, share, 120, 0));
        expect(120, 1);
        // Other places while batches are read ahead: the same step again, a later one, the steps of another
        // run.
        for (const std::int64_t step_first : {120, 0, 12, 600, 5, 17, 17, 3}) {
            expect(step_first, 0);
            expect(step_first, 2);
            expect(step_first, 2);
        }
    }
}

// A source that counts its reads.
class CountingSource final : public TokenSource {
  public:
    std::size_t shards() const override { return 1; }
    std::int64_t tokens(std::size_t) const override { return 100 * T + 1; }
    void read(std::size_t, std::int64_t, std::span<std::int32_t>) const override {
        const std::lock_guard lock(mutex_);
        reads_ += 1;
        readers_.insert(std::this_thread::get_id());
        changed_.notify_all();
    }
    // Whether the number of reads reaches `reads`.
    bool comes_to(int reads) const {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return reads_ >= reads; });
    }
    int reads() const {
        const std::lock_guard lock(mutex_);
        return reads_;
    }
    std::set<std::thread::id> readers() const {
        const std::lock_guard lock(mutex_);
        return readers_;
    }

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    mutable int reads_ = 0;
    mutable std::set<std::thread::id> readers_;
};

TEST(TrainingBatches, AreReadAheadByAThreadOfTheirOwn) {
    constexpr int of_micro_batch = 2 * 2;  // inputs and targets of two samples
    for (const int ahead : {1, 4}) {
        SCOPED_TRACE(ahead);
        const CountingSource source;
        const TrainingSamples samples(source, T, 1);
        const BatchShare share{.global_sequences = 6, .micro_batch = 2};
        TrainingBatches batches(samples, share, T, ahead);
        EXPECT_EQ(source.reads(), 0) << "where a run begins is not known before the first is asked for";
        // Two steps. Without a request, the micro-batches after the last requested one are read.
        for (int i = 0; i < 6; ++i) {
            read(batches, share, i / 3 * share.global_sequences, i % 3);
            ASSERT_TRUE(source.comes_to((i + 1 + ahead) * of_micro_batch)) << i;
            EXPECT_EQ(source.reads(), (i + 1 + ahead) * of_micro_batch) << i;
        }
        EXPECT_EQ(source.readers().size(), 1U);
        EXPECT_FALSE(source.readers().contains(std::this_thread::get_id()));
    }
}

// A source with one token that cannot be read.
class FaultySource final : public TokenSource {
  public:
    std::size_t shards() const override { return 1; }
    std::int64_t tokens(std::size_t) const override { return 6 * T + 1; }
    void read(std::size_t, std::int64_t first, std::span<std::int32_t> out) const override {
        if (first <= 3 * T && first + std::ssize(out) > 3 * T) user_error("token {} is no token", 3 * T);
    }
};

TEST(TrainingBatches, ThrowWhatIsWrongWithAMicroBatchWhereItIsUsed) {
    const FaultySource source;
    const TrainingSamples samples(source, T, 1);
    const BatchShare share{.global_sequences = 6};
    TrainingBatches batches(samples, share, T);
    std::vector<std::int64_t> faulty;
    for (std::int64_t step = 0; step < 2; ++step) {
        for (std::int64_t i = 0; i < 6; ++i) {
            bool expected = false, thrown = false;
            try {
                read_now(samples, share, 6 * step, i);
            } catch (const UserError&) {
                expected = true;
            }
            try {
                read(batches, share, 6 * step, i);
            } catch (const UserError& fault) {
                thrown = true;
                EXPECT_STREQ(fault.what(), "token 24 is no token");
            }
            EXPECT_EQ(thrown, expected) << step << ", " << i;
            if (thrown) faulty.push_back(i);
        }
    }
    EXPECT_EQ(faulty.size(), 4U) << "its window and the one before, whose last target it is, in both epochs";
}

// Three sparse files, which take no room on the disk, with a token at the end of each.
TEST(TrainingBatches, ReachTokensBeyondTwoToTheThirtySecond) {
    const fs::path folder =
        fs::temp_directory_path() / ("llmc_training_batches_test_" + std::to_string(getpid()));
    fs::create_directories(folder);
    constexpr std::int64_t most = (std::int64_t{1} << 31) - 1, long_T = std::int64_t{1} << 20;
    std::vector<std::string> files;
    for (const int width : {2, 2, 4}) {
        files.push_back((folder / fmt::format("{}.bin", files.size())).string());
        const std::array<std::int32_t, 3> header = {width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7,
                                                    static_cast<std::int32_t>(most)};
        const auto token = static_cast<std::uint32_t>(1 + files.size());
        std::ofstream file(files.back(), std::ios::binary);
        file.write(reinterpret_cast<const char*>(header.data()), sizeof(header));
        file.seekp(1024 + (most - 1) * width);
        file.write(reinterpret_cast<const char*>(&token), width);
    }
    const std::unique_ptr<TokenSource> source = open_token_shards(files, 50257, "--train-data");
    EXPECT_EQ(source->tokens(), 3 * most);
    const TrainingSamples samples(*source, long_T, 1);
    // A shard's last tokens are in its last window in epochs that start at the last left-over token.
    const std::int64_t windows = (most - 1) / long_T, left_over = (most - 1) % long_T;
    EXPECT_EQ(samples.windows(), 3 * windows);
    std::array<std::int64_t, 3> last{};
    for (std::int64_t i = 0; i < samples.windows(); ++i) {
        const auto [shard, first] = samples.window(i);
        last.at(shard) = std::max(last.at(shard), first);
    }
    for (const std::int64_t first : last) {
        EXPECT_GE(first, (windows - 1) * long_T);
        EXPECT_LE(first, (windows - 1) * long_T + left_over);
    }
    for (std::size_t shard = 0; shard < 3; ++shard) {
        std::array<std::int32_t, 2> tokens{-7, -7};
        source->read(shard, most - 2, tokens);
        EXPECT_EQ(tokens, (std::array<std::int32_t, 2>{0, static_cast<std::int32_t>(2 + shard)}));
    }
    const ValidationWindows all(*source, 8);
    EXPECT_EQ(all.targets(all.windows()), 3 * (most - 1));
    Tokens tokens{std::vector<std::int32_t>(8), std::vector<std::int32_t>(8)};
    all.read(all.windows() - 1, tokens.inputs, tokens.targets);
    EXPECT_EQ(tokens.targets[static_cast<std::size_t>((most - 2) % 8)], 4);
    fs::remove_all(folder);
}

}  // namespace
}  // namespace llmc
