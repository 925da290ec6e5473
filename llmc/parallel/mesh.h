// The mesh, and this process's rank and coordinates in it: world = pipeline x data x tensor. The
// tensor-parallel rank varies fastest, then the data-parallel rank, then the stage.
#pragma once

#include <string>

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

}  // namespace llmc
