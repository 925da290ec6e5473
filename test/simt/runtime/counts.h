// Counts of a program's calls to the tests' CUDA runtime. They are written at its end if SIMT_COUNT is set.
#pragma once

#include <algorithm>
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
    // The first launch of a kernel, or of a product's algorithm, while an operation of NCCL may spin.
    void loads_beside_nccl(const std::string& code) { ++numbers_["first launches beside NCCL"][code]; }
    // A kernel or a product runs while NCCL holds this many multiprocessors.
    void runs_beside(int held) {
        held_ += held;
        ++kernels_;
    }
    // Multiprocessors that operations of NCCL want at once.
    void wants(int multiprocessors) { most_wanted_ = std::max(most_wanted_, multiprocessors); }

    // As JSON: {"waits": {call: number}, "uploads": {...}, ..., "multiprocessors": {"most wanted": number, "mean held":
    // number}, "cudaMalloc": [bytes of each], "kernels": {symbol: blocks of its largest grid}}. Counts that stayed zero
    // are left out.
    void write(const std::string& file) const;

  private:
    std::map<std::string, std::map<std::string, std::uint64_t>> numbers_;  // {kind: {which: number}}
    std::vector<std::size_t> allocations_;
    std::int64_t held_ = 0, kernels_ = 0;  // sums of runs_beside
    int most_wanted_ = 0;
};

}  // namespace simt::runtime
