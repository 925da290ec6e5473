// The fastest runs of a model on a number of GPUs, and what makes a run fit that does not.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/planner/candidates.h"
#include "llmc/planner/planned_run.h"

namespace llmc {

// Which runs a search lists: the best one; and those that are among the `most` best and have `others` tokens/s. None
// below `needed` tokens/s has to be found.
struct Listed {
    std::size_t most = 10;
    double others = 0, needed = 0;
    // Runs that a bound does not show to be so many times as fast as a listed one may be left out.
    double at_least_faster = 1;
    // The most runs to simulate, and how many of those with the least memory must show first that any fits; 0: all.
    std::size_t tried = 0, tried_for_memory = 0;
};

// The best meshes, micro-batches and recomputations of `run`, of which only what read() finds is used. Without
// `uses_bounds` it simulates all, in place of those alone that may be listed: for the test that they are the same.
Search best_meshes(const PlannedRun& run, ModelTimes& passes, const Listed& listed = {},
                   Fixed fixed = Fixed::given, bool uses_bounds = true);

// The faster first; then those that leave more memory.
bool is_better(const Found& a, const Found& b);
// Adds a run to the `most` best, unless it is among them.
void keep_best(std::vector<Found>& best, const Found& found, std::size_t most = Listed().most);

// The best runs of all that each of the `alternatives`, options beside those of the run, makes possible.
Search best_with(const PlannedRun& run, const std::vector<std::string>& alternatives, ModelTimes& passes,
                 const Listed& listed, Fixed fixed);

// Where nothing fits: the best runs with options that need less memory. First those that leave all numbers of the
// training as they are: state in the host's memory, if that is known, or on a disk that was named. Then gradients,
// moments and weights in smaller formats. Then a disk.
Search best_with_less(const PlannedRun& run, ModelTimes& passes, const Listed& listed, Fixed fixed);

// A note where formats had to change.
inline constexpr std::string_view tries_the_host =
    "with --host-memory, state in the host's memory is tried before other formats";
// Whether options change the numbers of the training, by its formats.
bool changes_numbers(const std::string& options);

}  // namespace llmc
