// The parallel matrix: {stages of ZeRO} x {pipeline stages and their schedules} x {data ranks} x {tensor-parallel ranks, and
// whether they divide tokens} x {recompute} x {micro-batches, and when they are reduced} x {dtypes}, for one model.
#pragma once

#include <functional>
#include <vector>

#include "training_run.h"

namespace llmc::test {

struct MeshSizes {
    int pipeline, data, tensor;
    bool sequence_parallel = false;
    int shards = 0;  // of the data ranks; 0: all
    int ranks() const { return pipeline * data * tensor; }
};

// Settings that train the same run to the bit, the plain one first.
using Equals = std::vector<TrainingSetting>;

// All of up to 8 processes with powers of two.
std::vector<MeshSizes> meshes_of_powers_of_two();

struct Matrix {
    TrainingSetting plain;  // the model, the batch and the steps
    std::vector<MeshSizes> meshes;
    // Settings of one mesh, dtypes and accumulation are the same to the bit where this is the same number.
    std::function<int(const TrainingSetting&)> order_of_sums = [](const TrainingSetting&) { return 0; };
};

// All, those of one run together.
std::vector<Equals> whole_matrix(const Matrix& matrix);
// Settings of it in which every two values meet that meet in the whole, and those that must be met.
std::vector<Equals> part_of_matrix(const std::vector<Equals>& whole,
                                   bool (*must_be_met)(const TrainingSetting&));
// How many pairs of values do not meet in a part.
int count_unmet(const std::vector<Equals>& whole, const std::vector<Equals>& part);

std::string name_of_run(const Equals& run);
bool fits_here(const Equals& settings);

// Each of the settings trains the same, to the bit; near what one process does, in fp32; and sends what its list says.
void expect_one_run(const Matrix& matrix, const Equals& settings);

}  // namespace llmc::test
