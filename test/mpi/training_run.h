// A short training on generated tokens, on any mesh, and its results, for tests that compare meshes. No file
// is read or written.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/model/part_lists.h"
#include "llmc/parallel/pipeline/pipeline_schedule.h"
#include "llmc/parallel/step/step.h"
#include "llmc/parallel/zero/sharding.h"
#include "test/gpt2_config.h"

namespace llmc::test {

struct TrainingSetting {
    GPTConfig config{};
    const Model* model = nullptr;  // otherwise GPT-2 of this size
    int family = 0;                // the number of the model's family in a matrix of several
    DType dtype = DType::fp32, gradients = DType::fp32;
    // The mesh: pipeline x sharding.ranks() x tensor ranks.
    int pipeline = 1, tensor = 1;
    bool sequence_parallel = false;
    Sharding sharding{};
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int virtual_stages = 1;
    Recompute recompute{};
    std::int64_t sequences = 1;  // sequences of all data ranks in a step
    int micro_batches = 1;       // micro-batches of each data rank
    int steps = 1;
    bool reads = false;  // whether all lists compute the first sequence's losses at the end

    int ranks() const { return pipeline * sharding.ranks() * tensor; }
};

inline constexpr double learning_rate = 1e-3;  // the same in every step

struct TrainingResult {
    std::vector<double> losses, norms;  // for each step: the sum of its tokens' losses, the squared norm
    // On the root: weights and both moments of all units, without the padding after each unit's last tensor.
    std::vector<float> state;
    // The bytes that this rank sent in all steps: counted by its communicators, and by the lists.
    BytesSent counted, listed;
    // Bytes in `counted.inside` and `.tensor` that the lists do not have: the sums of the gradients' squares.
    std::uint64_t of_squares = 0, of_all_squares = 0;
    // The sum of the first sequence's losses at the end: from an evaluation, from this sequence alone, and
    // from generation's rows.
    double evaluated = 0, diagnosed = 0, generated = 0;
};

Model model_of(const TrainingSetting& setting);

// The text that names a setting in a failure.
std::string to_string(const TrainingSetting& setting);

// The tokens of a step, starting at a sequence.
void fill_tokens(const Model& model, std::int64_t first_sequence, int step, std::span<std::int32_t> inputs,
                 std::span<std::int32_t> targets);

// Trains on all ranks of `ranks`, which must be as many as the setting takes. Fails the test if ranks that
// hold the same state differ at the end.
TrainingResult train(Communicator& ranks, const TrainingSetting& setting);

// Expects equal bits.
void expect_same(const TrainingResult& a, const TrainingResult& b);
// Expects each step's loss within a relative distance of `expected`'s.
void expect_near_losses(const TrainingResult& result, const TrainingResult& expected, double relative);
// Expects the counted bytes to be those of the lists.
void expect_bytes_of_list(const TrainingResult& result);

}  // namespace llmc::test
