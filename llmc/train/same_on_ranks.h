// Compares what the ranks of a job have: their options, or the records of their data.
#pragma once

#include <functional>
#include <string>

#include "llmc/comm/communicator.h"

namespace llmc {

// What a rank has to compare, as a text; or if it is not `valid`, the reason why it has nothing.
struct RankText {
    std::string text;
    bool valid = true;
};

// A rank, and the first of those that have what most ranks have.
struct DifferentRank {
    int rank;
    RankText has;
    int other;
    std::string other_has;
};

// Calls `see` for each rank that has another text than most ranks with a valid one, in the order of ranks. Where no
// rank has a valid text, there is nothing to compare. All ranks call this function, and `see` is called with the same
// arguments on all of them: if it throws, they throw together, so that none waits for another. With one rank, nothing
// happens.
void for_each_different_rank(Communicator& world, const RankText& own,
                             const std::function<void(const DifferentRank&)>& see);

}  // namespace llmc
