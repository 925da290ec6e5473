// What a program asked of the tests' CUDA runtime, written at its end where SIMT_COUNT asks for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simt::runtime {

class Counts {
  public:
    // The host waits in a call, or finds by polling that work is not done yet.
    void waits(const char* call) { ++waits_[call]; }
    void allocates(std::size_t bytes) { allocations_.push_back(bytes); }

    // As JSON: {"waits": {call: number}, "cudaMalloc": [bytes of each]}.
    void write(const std::string& file) const;

  private:
    std::map<std::string, std::uint64_t> waits_;
    std::vector<std::size_t> allocations_;
};

}  // namespace simt::runtime
