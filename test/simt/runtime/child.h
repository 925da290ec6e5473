// Runs a piece of a test as a separate process. The runtime reads its settings once, reports some faults by
// ending the process, and reports others at the end of the process.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace runtime_test {

using Environment = std::map<std::string, std::string>;

// How the process ended, and its standard error output.
struct Outcome {
    int status;  // exit status, or 128 + the signal
    std::string errors;

    bool good() const { return status == 0; }
};
std::ostream& operator<<(std::ostream& out, const Outcome& outcome);

// The process ends like std::exit: with 0 if the body returned true, with `wrong` if it returned false.
using Body = std::function<bool()>;
inline constexpr int wrong = 99;
Outcome run_process(const Environment& environment, const Body& body);
// Runs processes concurrently. The body receives the process's number.
std::vector<Outcome> run_processes(int count, const Environment& environment,
                                   const std::function<bool(int)>& body);

// True if the body returns true under each of the seeds 0 to 9.
testing::AssertionResult is_right_in_any_order(const Body& body);
// True if the body returns false under some of them. A process that ends in another way is a failure.
testing::AssertionResult goes_wrong_in_some_order(const Body& body);

// Whether the last error is this one, and is cleared by reading it.
bool is_last_error(cudaError_t error);
// Ends the process if a call of CUDA fails.
void must(cudaError_t error);

}  // namespace runtime_test
