// The mesh, and this process's rank and coordinates in it: world = pipeline x data x tensor. The
// tensor-parallel rank varies fastest, then the data-parallel rank, then the stage.
//
// This file also checks that a mesh fits the processes and the model. If not, the error message names sizes
// that fit. Two checks are elsewhere: that the mesh divides the global batch (plan/micro_batches.h), and
// schedules (pipeline_schedule.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "llmc/model/model.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/parallel/zero/sharding.h"

namespace llmc {

struct Mesh {
    int pipeline = 1;                // stages
    int tensor = 1;                  // ranks that share each layer
    bool sequence_parallel = false;  // also divides the tokens of the residual stream
    Sharding sharding{};             // how data-parallel ranks divide the state
    int rank = 0;                    // the number of this process in the job

    int data_ranks() const { return sharding.ranks(); }
    int world() const { return pipeline * data_ranks() * tensor; }

    int tensor_rank() const { return rank % tensor; }
    int data_rank() const { return rank / tensor % data_ranks(); }
    int stage() const { return rank / (tensor * data_ranks()); }
    int shard() const { return sharding.shard_of(data_rank()); }
    int rank_of(int stage, int data_rank, int tensor_rank) const {
        return (stage * data_ranks() + data_rank) * tensor + tensor_rank;
    }

    TensorSplit split() const { return {tensor, sequence_parallel}; }
    TensorRank tensor_place() const { return {tensor_rank(), tensor}; }

    std::string description() const;
    // This rank's coordinates: "stage 1, data 0, tensor 1".
    std::string place() const;
};

struct MeshSizes {
    std::optional<std::int64_t> processes{};  // unset: as many as the mesh needs
    std::int64_t pipeline = 1, virtual_stages = 1;
    std::int64_t chunks_without_layers = 0;  // by --pipeline-layers
    std::int64_t tensor = 1;
    bool sequence_parallel = false;
    // Sequences in the global batch, which data-parallel ranks share. Suggested sizes divide it, if any do.
    std::optional<std::int64_t> batch_sequences{};
};

// Whether a mesh fits. The processes divide into stages, and each stage into tensor-parallel groups. Each
// chunk has a layer that needs one. The tensor-parallel ranks divide the heads, and with sequence parallelism also the
// tokens.
bool fits(const MeshSizes& sizes, const Model& model);

// Throws a UserError if a mesh does not fit. The message names the option, and sizes of it that fit with the
// other options. check_chunks (pipeline_schedule.h) checks several chunks per stage; its message is more
// precise if there are too few layers.
void check_mesh_sizes(const MeshSizes& sizes, const Model& model);

}  // namespace llmc
