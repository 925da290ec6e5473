// Shared by the kernels' tests: the seed, the chips, and the CPU device to compare with. The same tests run
// on the executor (plain, and under two sanitizers) and, compiled by nvcc, on a GPU.
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
using llmc::cuda::fp16;
using llmc::cuda::LaunchContext;
using llmc::cuda::to_float;

// The seed of the inputs. It is new in each run and is printed; KERNEL_SEED repeats it.
std::uint64_t seed();

// The contexts to launch in: the limits of sm_80, sm_86 and sm_90 on the executor (only sm_80 under
// ThreadSanitizer), or the GPU itself.
std::vector<LaunchContext> launch_contexts();
// These, and always sm_86: for launchers that choose another kernel if a chip has less shared memory.
std::vector<LaunchContext> contexts_of_all_tilings();
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

llmc::Ops& cpu();
const llmc::DeviceSizes& cpu_sizes();

// The CPU device's view of an array.
inline llmc::Tensor tensor(Array<float>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::fp32, shape};
}
inline llmc::Tensor tensor(Array<bf16>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::bf16, shape};
}
inline llmc::Tensor tensor(Array<fp16>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::fp16, shape};
}
inline llmc::Tensor tensor(Array<double>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::fp64, shape};
}
inline llmc::Tensor tensor(Array<std::int32_t>& array, const llmc::Shape& shape) {
    return {reinterpret_cast<std::byte*>(array.data()), llmc::DType::int32, shape};
}

// The largest number of X
template <class X>
inline constexpr float largest = std::is_same_v<X, float>  ? 0x1.fffffep127f
                                 : std::is_same_v<X, bf16> ? 0x1.fep127f
                                                           : 65504.0f;

// The error bound if two devices compute the same number in fp32, each within `error` of the true one, and
// round it to X.
template <class X>
double twice_rounded(double value, double error) {
    return 2 * lab::rounded<X>(value, error);
}

template <class X>
class Kernels : public testing::Test {};
using Dtypes = testing::Types<float, bf16, fp16>;
using HalfDtypes = testing::Types<bf16, fp16>;
using Fp32AndBf16 = testing::Types<float, bf16>;

}  // namespace kernel_test
