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
    void waits(const char* call) { ++numbers_["waits"][call]; }
    void allocates(std::size_t bytes) { allocations_.push_back(bytes); }
    // A copy of the host's memory, pinned or not, to a device.
    void uploads(bool pinned, unsigned stream) {
        ++numbers_["uploads"][(pinned ? "pinned, stream " : "pageable, stream ") + std::to_string(stream)];
    }
    void launches(unsigned stream) { ++numbers_["launches"]["stream " + std::to_string(stream)]; }
    void multiplies(int algorithm) { ++numbers_["products"]["algorithm " + std::to_string(algorithm)]; }
    // cuBLASLt is told of a product, a matrix or a preference.
    void describes(const char* what) { ++numbers_["descriptions"][what]; }
    void communicates(int priority) { ++numbers_["NCCL"]["priority " + std::to_string(priority)]; }

    // As JSON: {"waits": {call: number}, "uploads": {...}, ..., "cudaMalloc": [bytes of each]}. What never was is left out.
    void write(const std::string& file) const;

  private:
    std::map<std::string, std::map<std::string, std::uint64_t>> numbers_;  // {kind: {which: number}}
    std::vector<std::size_t> allocations_;
};

}  // namespace simt::runtime
