// The parallel matrix of one model or of several. Its dimensions: {models} x {ZeRO stages}
// x {pipeline stages and their schedules} x {data ranks} x {tensor-parallel ranks, with and without sequence
// parallelism} x {recompute} x {micro-batches, and when they are reduced} x {dtypes}.
#pragma once

#include <functional>
#include <vector>

#include "training_run.h"

namespace llmc::test {

struct MeshSizes {
    int pipeline, data, tensor;
    bool sequence_parallel = false;
    int shards = 0;  // number of data ranks that share the state; 0: all
    int ranks() const { return pipeline * data * tensor; }
};

// Settings whose runs agree bit by bit. The plain one comes first.
using Equals = std::vector<TrainingSetting>;

// All meshes of up to 8 processes whose sizes are powers of two.
std::vector<MeshSizes> meshes_of_powers_of_two();

struct Matrix {
    TrainingSetting plain;  // the model, the batch and the steps
    std::vector<MeshSizes> meshes;
    // Settings of one mesh, dtypes and accumulation agree bit by bit if this returns the same number.
    std::function<int(const TrainingSetting&)> order_of_sums = [](const TrainingSetting&) { return 0; };
};

// All settings; those of one run are together.
std::vector<Equals> whole_matrix(const Matrix& matrix);
// The settings that must be in the part, and enough others that every two values that meet in the whole
// matrix also meet here.
std::vector<Equals> part_of_matrix(const std::vector<Equals>& whole,
                                   bool (*must_be_in_part)(const TrainingSetting&));
// The number of pairs of values that do not meet in a part.
int count_unmet(const std::vector<Equals>& whole, const std::vector<Equals>& part);

std::string name_of_run(const Equals& run);
bool fits_here(const Equals& settings);

// Each of the settings trains the same run bit by bit. In fp32, the run is near that of one process. Each run
// sends the bytes of its list.
void expect_one_run(const Matrix& matrix, const Equals& settings);

}  // namespace llmc::test
