// A short training on made-up tokens, on any mesh: what it left, for tests that compare meshes. No file is read or written.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/model/recompute.h"
#include "llmc/parallel/pipeline_schedule.h"
#include "llmc/parallel/sharding.h"
#include "llmc/parallel/step.h"
#include "test/gpt2_config.h"

namespace llmc::test {

struct TrainingSetting {
    GPTConfig config{};
    const Model* model = nullptr;  // otherwise GPT-2 of this size
    DType dtype = DType::fp32, gradients = DType::fp32;
    // The mesh: pipeline x sharding.ranks() x tensor ranks.
    int pipeline = 1, tensor = 1;
    bool sequence_parallel = false;
    Sharding sharding{};
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int virtual_stages = 1;
    Recompute recompute{};
    std::int64_t sequences = 1;  // of all data ranks in a step
    int micro_batches = 1;       // of each of them
    int steps = 1;
    bool reads = false;  // the first sequence in the end

    int ranks() const { return pipeline * sharding.ranks() * tensor; }
};

inline constexpr double learning_rate = 1e-3;  // of every step

struct TrainingResult {
    std::vector<double> losses, norms;  // of each step: summed over tokens, squared
    // Of all units without what is behind their last tensor, on the root: weights, then both moments.
    std::vector<float> state;
    // What this rank sent in all steps, by what its communicators counted, and what the lists say.
    BytesSent counted, listed;
    // In `counted.inside` and `.tensor` beside what the lists say: the gradients' sums of squares.
    std::uint64_t of_squares = 0, of_all_squares = 0;
    // Of the first sequence the sum of losses in the end: of an evaluation, of one alone, and by generation's rows.
    double evaluated = 0, diagnosed = 0, generated = 0;
};

Model model_of(const TrainingSetting& setting);

// What a failure names.
std::string to_string(const TrainingSetting& setting);

// Of a step: from a sequence on.
void fill_tokens(const Model& model, std::int64_t first_sequence, int step, std::span<std::int32_t> inputs,
                 std::span<std::int32_t> targets);

// Trains on all ranks of `ranks`, as many as the setting takes. Fails the test where ranks that have the same are not alike
// in the end.
TrainingResult train(Communicator& ranks, const TrainingSetting& setting);

// To the bit.
void expect_same(const TrainingResult& a, const TrainingResult& b);
// Each step's loss within a part of `expected`'s.
void expect_near_losses(const TrainingResult& result, const TrainingResult& expected, double relative);
// What was counted is what the lists say.
void expect_bytes_of_list(const TrainingResult& result);

}  // namespace llmc::test
