// Runs a piece of a test as a process of its own, since the runtime reads its settings once, reports some faults by
// ending the process, and others at its end.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace runtime_test {

using Environment = std::map<std::string, std::string>;

// How the process ended, and its standard error.
struct Outcome {
    int status;  // of its exit, or 128 + the signal
    std::string errors;

    bool good() const { return status == 0; }
};
std::ostream& operator<<(std::ostream& out, const Outcome& outcome);

// The process ends as std::exit does: with 0 where the body returned true, with `wrong` where it returned false.
using Body = std::function<bool()>;
inline constexpr int wrong = 99;
Outcome run_process(const Environment& environment, const Body& body);
// Side by side; the body is given the process's number.
std::vector<Outcome> run_processes(int count, const Environment& environment,
                                   const std::function<bool(int)>& body);

// True where the body computes what it should under every one of the first seeds.
testing::AssertionResult is_right_in_any_order(const Body& body);
// True where it does not under some of them, or is reported.
testing::AssertionResult goes_wrong_in_some_order(const Body& body);

// That the last error is this one, and then none.
bool is_last_error(cudaError_t error);
// Ends the process where a call of CUDA's fails.
void must(cudaError_t error);

}  // namespace runtime_test
