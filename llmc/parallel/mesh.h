// Where this process stands among all: today every process is a data-parallel rank.
#pragma once

#include <string>

#include "llmc/parallel/sharding.h"

namespace llmc {

struct Mesh {
    Sharding sharding{};  // of the data-parallel ranks
    int data_rank = 0;

    int data_ranks() const { return sharding.ranks(); }
    int world() const { return data_ranks(); }
    int shard() const { return sharding.shard_of(data_rank); }
    std::string description() const {
        if (data_ranks() == 1) return "1 process";
        const std::string shards = sharding.description();
        return std::to_string(data_ranks()) + " processes, data parallel" +
               (shards.empty() ? "" : "; " + shards);
    }
};

}  // namespace llmc
