// Where this process stands among all: today every process is a data-parallel rank.
#pragma once

#include <string>

namespace llmc {

struct Mesh {
    int data_ranks = 1;
    int data_rank = 0;

    int world() const { return data_ranks; }
    std::string description() const {
        return data_ranks == 1 ? "1 process" : std::to_string(data_ranks) + " processes, data parallel";
    }
};

}  // namespace llmc
