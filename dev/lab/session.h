// A session with an operation of the lab: its variants checked, and timed on a GPU, as tables on standard output.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "dev/lab/lab.h"

namespace lab {

struct SessionOptions {
    std::vector<int> variants;  // all without
    std::string dtype = "bf16";
    std::uint64_t seed = std::random_device{}();
    bool check = true;
    bool time = true;  // where there is a GPU
    std::string json;  // file that gets a line for each timing; none without
};

// False where a variant is wrong.
bool run_session(const Operation& operation, const SessionOptions& options);

}  // namespace lab
