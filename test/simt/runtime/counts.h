// Counts of a program's calls to the tests' CUDA runtime. They are written at its end if SIMT_COUNT is set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simt::runtime {

class Counts {
  public:
    // The host waits in a call, or polls and finds that work is not done yet.
    void waits(const char* call) { ++numbers_["waits"][call]; }
    void allocates(std::size_t bytes) { allocations_.push_back(bytes); }
    // A copy of the host's memory, pinned or pageable, to a device.
    void uploads(bool pinned, unsigned stream) {
        ++numbers_["uploads"][(pinned ? "pinned, stream " : "pageable, stream ") + std::to_string(stream)];
    }
    void launches(unsigned stream) { ++numbers_["launches"]["stream " + std::to_string(stream)]; }
    void multiplies(int algorithm) { ++numbers_["products"]["algorithm " + std::to_string(algorithm)]; }
    // A description of a product, a matrix or a preference for cuBLASLt.
    void describes(const char* what) { ++numbers_["descriptions"][what]; }
    void communicates(int priority) { ++numbers_["NCCL"]["priority " + std::to_string(priority)]; }

    // As JSON: {"waits": {call: number}, "uploads": {...}, ..., "cudaMalloc": [bytes of each]}. Counts that
    // stayed zero are left out.
    void write(const std::string& file) const;

  private:
    std::map<std::string, std::map<std::string, std::uint64_t>> numbers_;  // {kind: {which: number}}
    std::vector<std::size_t> allocations_;
};

}  // namespace simt::runtime
