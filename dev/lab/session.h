// A session with an operation of the lab: checks its variants and, on a GPU, times them; prints tables to
// standard output.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "dev/lab/lab.h"

namespace lab {

struct SessionOptions {
    std::vector<int> variants;  // if empty, all
    std::string dtype = "bf16";
    std::uint64_t seed = std::random_device{}();
    bool check = true;
    bool time = true;  // if there is a GPU
    std::string json;  // file that gets a line per timing; none if empty
};

// Returns false if a variant is wrong.
bool run_session(const Operation& operation, const SessionOptions& options);

}  // namespace lab
