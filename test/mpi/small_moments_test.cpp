// No update with moments in 8 bits is much larger than with moments in fp32.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llmc/core/random.h"
#include "llmc/io/model_files.h"
#include "mpi_test.h"
#include "trainer_run.h"

namespace llmc {
namespace {

using test::world;

constexpr std::int64_t steps = 300;
constexpr double learning_rate = 1e-3;

// The largest change of a weight in a step after the first, divided by the learning rate.
double largest_update(const TokenSource& source, std::vector<const char*> options, const char* moments) {
    options.insert(options.end(), {"--lr=1e-3", "--lr-schedule=constant", "--weight-decay=0", moments});
    test::TrainerRun run(options);
    const std::int64_t T = run.plan().spec.model.sequence_length;
    const TrainingSamples samples(source, T, 1);
    TrainingBatches batches(samples, run.plan().share(), T);
    Trainer& trainer = run.trainer();
    const ParameterStore& store = trainer.store();
    std::vector<std::vector<float>> before(static_cast<std::size_t>(store.units()));
    std::vector<float> now;
    double largest = 0;
    for (std::int64_t step = 1; step <= steps; ++step) {
        trainer.train_step(batches);
        trainer.finish_update();
        for (int unit = 0; unit < store.units(); ++unit) {
            std::vector<float>& was = before[static_cast<std::size_t>(unit)];
            now.resize(static_cast<std::size_t>(store.elements(unit)));
            store.read(unit, Kept::master, now);
            for (std::size_t i = 0; step > 1 && i < now.size(); ++i)
                largest = std::max(largest, std::fabs(double{now[i]} - was[i]) / learning_rate);
            was = now;
        }
    }
    return largest;
}

void expect_alike(const TokenSource& source, const std::vector<const char*>& options) {
    const double in_fp32 = largest_update(source, options, "--moments-dtype=fp32"),
                 in_8_bits = largest_update(source, options, "--moments-dtype=8bit");
    EXPECT_NE(in_8_bits, in_fp32);
    EXPECT_LE(in_8_bits, 2 * in_fp32);
}

// Half of the tokens occur once each; the others often. A rare token's row of the table has a gradient in one step, and
// its second moment then decays below all others of its block.
TEST(SmallMoments, OfRareTokensMoveNoWeightFar) {
    if (world().size() > 1) GTEST_SKIP() << "one process trains";
    const RandomStream random(1, "rare tokens");
    std::vector<std::uint8_t> bytes(20000);
    for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<std::uint8_t>(1 + 2 * random.below(2 * i, 1 + random.below(2 * i + 1, 128)));
    for (std::size_t token = 0; token < 256; token += 2)
        bytes[77 * (token + 1)] = static_cast<std::uint8_t>(token);
    expect_alike(*make_text_source({.name = "rare", .owner = nullptr, .bytes = bytes}, 256),
                 {"--model=llama-tiny", "--layers=1", "--heads=2", "--kv-heads=1", "--channels=64",
                  "--mlp-size=64", "--global-batch-tokens=64"});
}

TEST(SmallMoments, OfATextMoveNoWeightFar) {
    if (world().size() > 1) GTEST_SKIP() << "one process trains";
    test::StoriesRun stories({"--seed=1"});
    expect_alike(*stories.data().training, {"--channels=64", "--global-batch-tokens=64"});
}

// Files of earlier programs may have second moments of 0 beside first ones that are not.
TEST(SmallMoments, OfEarlierProgramsGoOn) {
    if (world().size() > 1) GTEST_SKIP() << "one process reads and writes";
    test::TrainerRun run({"--moments-dtype=8bit"});
    ParameterStore& store = run.trainer().store();
    constexpr int unit = 0;
    std::vector<float> first(static_cast<std::size_t>(store.elements(unit)), 0.0F), second(first),
        read(first);
    first[5] = 0.25F;
    first[6] = -0.5F;
    second[6] = 1.0F;
    store.set_state(unit, Kept::state1, first);
    store.set_state(unit, Kept::state2, second);
    // The state as version 2 of checkpoints had it.
    UnitTransfer& transfer = run.trainer().transfer();
    const std::string folder = testing::TempDir(), weights = folder + "weights.safetensors";
    save_tensors(weights, store, transfer, Kept::master, false);
    StoredTensors stored(folder);
    stored.add(weights);
    for (const auto& [kept, name] : {std::pair(Kept::state1, ".exp_avg"), {Kept::state2, ".exp_avg_sq"}}) {
        const std::string values = folder + "values.safetensors",
                          file = folder + "state" + name + ".safetensors";
        save_tensors(values, store, transfer, kept, false);
        const SafetensorsReader reader(values);
        std::vector<SafetensorsEntry> entries = reader.entries();
        for (SafetensorsEntry& entry : entries) entry.name += name;
        SafetensorsWriter writer(file, entries);
        for (const SafetensorsEntry& entry : reader.entries()) {
            std::vector<std::byte> bytes(entry.bytes());
            reader.read(entry.name, std::span<std::byte>(bytes));
            writer.append(entry.name + name, bytes);
        }
        writer.finish();
        stored.add(file, {}, "optim.state.");
    }
    load_stored([&] { return stored; }, store, transfer, Tensors::weights, true, true);
    store.read(unit, Kept::state2, read);
    second[5] = 0.0625F;
    EXPECT_EQ(read, second);
}

}  // namespace
}  // namespace llmc
