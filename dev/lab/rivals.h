// The library functions that an operation of the lab is compared with, timed in the same run: cuBLASLt for
// matrix products, cuDNN for attention. Each has its own random inputs.
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
    cudaStream_t stream = nullptr;  // the stream of `run`
    std::string missing = {};       // the reason if `run` is empty
};

// The rivals of an operation at one of its shapes; empty if no library has it.
std::vector<Rival> rivals_of(const std::string& operation, llmc::DType dtype,
                             const std::vector<std::int64_t>& shape);

}  // namespace lab
