// What the kernels' tests share: the seed, the chips, and the CPU device to compare with. The same tests run on
// the executor (plain, and under two sanitizers) and, compiled by nvcc, on a GPU.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"
#include "llmc/core/tensor.h"
#include "llmc/device/cuda/kernel.cuh"
#include "llmc/device/device.h"
#include "llmc/device/ops.h"

namespace kernel_test {

using lab::Array;
using lab::Comparison;
using lab::Draw;
using llmc::cuda::bf16;
using llmc::cuda::LaunchContext;
using llmc::cuda::to_float;

// Inputs are drawn afresh in each run; the seed is printed, and KERNEL_SEED repeats it.
std::uint64_t seed();

// Where to launch: the limits of sm_80, sm_86 and sm_90 on the executor (under ThreadSanitizer of sm_80 alone), the
// GPU itself on a GPU.
std::vector<LaunchContext> launch_contexts();
// These, and sm_86 in any case: for launchers that take another kernel where a chip has less shared memory.
std::vector<LaunchContext> contexts_of_all_tilings();
void synchronize();

// While it lives, kernels run that the compiler's report does not know, since it is made of dev/*.cu: a test's own.
class UnreportedKernels {
  public:
    UnreportedKernels();
    ~UnreportedKernels();
    UnreportedKernels(const UnreportedKernels&) = delete;
    UnreportedKernels& operator=(const UnreportedKernels&) = delete;
};

// Under ThreadSanitizer, which is slow, only those that are `for_races`: small ones that run every kernel of the operation,
// in two blocks or more, with two turns of a loop that has barriers. Without, the first of all.
template <class Shape>
std::vector<Shape> shapes(const std::vector<Shape>& all,
                          [[maybe_unused]] const std::vector<Shape>& for_races = {}) {
#ifdef SIMT_THREAD
    return for_races.empty() ? std::vector<Shape>{all.front()} : for_races;
#else
    return all;
#endif
}

llmc::Ops& cpu();

// The CPU device's view of an array.
inline llmc::Tensor tensor(Array<float>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::fp32, shape};
}
inline llmc::Tensor tensor(Array<bf16>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::bf16, shape};
}
inline llmc::Tensor tensor(Array<double>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::fp64, shape};
}
inline llmc::Tensor tensor(Array<std::int32_t>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::int32, shape};
}

// Two devices compute the same number in fp32, each within `error` of the true one, and round it to X.
template <class X>
double twice_rounded(double value, double error) {
    return 2 * lab::rounded<X>(value, error);
}

template <class X>
class Kernels : public testing::Test {};
using Dtypes = testing::Types<float, bf16>;

}  // namespace kernel_test
