// What a library offers for an operation of the lab, timed in the same run: cuBLASLt for matrix products, cuDNN for
// attention. Each has inputs of its own, random ones.
#pragma once

#include <driver_types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "llmc/core/dtype.h"

namespace lab {

struct Rival {
    std::string name;
    std::function<void()> run;
    cudaStream_t stream = nullptr;  // where that runs
    std::string missing = {};       // where there is no `run`: why
};

// Of the operation at a shape of its lab; none where no library has it.
std::vector<Rival> rivals_of(const std::string& operation, llmc::DType dtype,
                             const std::vector<std::int64_t>& shape);

}  // namespace lab
