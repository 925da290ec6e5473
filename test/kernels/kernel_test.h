// Shared by the kernels' tests: the seed and the chips. The same tests run on the executor (plain, and under
// two sanitizers) and, compiled by nvcc, on a GPU.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"
#include "llmc/device/cuda/kernel.cuh"

namespace kernel_test {

using lab::Array;
using lab::Comparison;
using lab::Draw;
using llmc::cuda::bf16;
using llmc::cuda::fp16;
using llmc::cuda::LaunchContext;
using llmc::cuda::to_float;

// The seed of the inputs. It is new in each run and is printed; KERNEL_SEED repeats it.
std::uint64_t seed();

// The contexts to launch in: the limits of sm_80, sm_86 and sm_90 on the executor (only sm_80 under
// ThreadSanitizer), or the GPU itself.
std::vector<LaunchContext> launch_contexts();
void synchronize();

// While it exists, a test may run kernels of its own. They are not in the compiler's report, which has those
// that the trainer links.
class UnreportedKernels {
  public:
    UnreportedKernels();
    ~UnreportedKernels();
    UnreportedKernels(const UnreportedKernels&) = delete;
    UnreportedKernels& operator=(const UnreportedKernels&) = delete;
};

// The shapes to test. Under ThreadSanitizer, which is slow, only `for_races`, or the first of all if that is
// empty. Those shapes are small, but run every kernel of the operation in two or more blocks, with two
// iterations of each loop that has barriers.
template <class Shape>
std::vector<Shape> shapes(const std::vector<Shape>& all,
                          [[maybe_unused]] const std::vector<Shape>& for_races = {}) {
#ifdef SIMT_THREAD
    return for_races.empty() ? std::vector<Shape>{all.front()} : for_races;
#else
    return all;
#endif
}

template <class X>
class Kernels : public testing::Test {};
using Dtypes = testing::Types<float, bf16, fp16>;
using HalfDtypes = testing::Types<bf16, fp16>;

}  // namespace kernel_test
