// The norm of the gradient, in three variants. The squares of n numbers are summed in fp32 per block of 1024
// (global_norm_squared of llmc/device/ops.h). These sums are then added in fp64 (sum). The two steps give the
// norm the same bits however the gradient is sharded.
//
// There are two operations per element, so memory is the limit: 4 n bytes to read in fp32, once. The blocks'
// sums are a thousandth of that. The second step is the same in all variants: two kernels of a few
// microseconds, which nothing hides. The aim is to have enough bytes in flight:
//   1  A thread does a block of 1024. The lanes of a warp read 4 KB apart: 32 lines per load, for 4 bytes
//      each.
//   2  A thread block does it: coalesced, but 4-byte loads, and two barriers for 4 KB of data.
//   3  A warp does it: eight 16-byte loads per lane, all 4 KB in flight at once. Shuffles add the lanes'
//      sums, and no warp waits for another (llmc/device/cuda/global_norm.cuh).
#include "llmc/device/cuda/global_norm.cuh"

#include "dev/lab/lab.h"

namespace lab::global_norm_variants {

using namespace llmc::cuda;

template <int elements, class X>
__global__ void global_norm_squared_kernel1(float* partials, const X* x, std::int64_t blocks) {
    const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block >= blocks) return;
    float sum = 0;
    for (int i = 0; i < elements; ++i) {
        const float value = to_float(x[block * elements + i]);
        sum += value * value;
    }
    partials[block] = sum;
}

template <int elements, class X>
__global__ void global_norm_squared_kernel2(float* partials, const X* x) {
    const X* const values = x + std::int64_t{blockIdx.x} * elements;
    float sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < elements; i += static_cast<int>(blockDim.x)) {
        sum += to_float(values[i]) * to_float(values[i]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <class X>
class GlobalNorm : public Problem {
  public:
    GlobalNorm(const Shape& shape, Draw& draw)
        : blocks_(shape[0]),
          x_(blocks_ * elements),
          partials_(blocks_),
          out_(1),
          workspace_(static_cast<std::int64_t>(sum_workspace_bytes())) {
        draw.normal(x_, 0.01);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto grid = static_cast<unsigned>(blocks_);
        switch (variant) {
            case 1:
                launch(on, global_norm_squared_kernel1<elements, X>,
                       blocks_for(grid, static_cast<unsigned>(block_size)), block_size, 0, partials_.data(),
                       x_.data(), blocks_);
                break;
            case 2:
                launch(on, global_norm_squared_kernel2<elements, X>, grid, block_size, 0, partials_.data(),
                       x_.data());
                break;
            case 3:
                global_norm_squared(on, partials_.data(), x_.data(), blocks_ * elements, block_size);
                break;
            default:
                llmc::programming_error("no such variant");
        }
        sum(on, out_.data(), partials_.data(), blocks_, workspace_.data());
    }

    void reset() override {
        partials_.clear();
        out_[0] = before;
    }

    void compare(Comparison& comparison) override {
        // A square, and the additions of 1024 of them. All terms are positive.
        constexpr double error = (elements + 1) * unit_roundoff<float>;
        double total = 0, partials = before;
        for (std::int64_t block = 0; block < blocks_; ++block) {
            double squares = 0;
            for (std::int64_t i = block * elements; i < (block + 1) * elements; ++i) {
                squares += double{to_float(x_[i])} * to_float(x_[i]);
            }
            comparison.see("partials", block, partials_[block], squares, error * squares);
            total += squares;
            partials += double{partials_[block]};
        }
        comparison.see("norm", 0, out_[0] - before, total, 2 * error * total);
        // The fp64 additions of the kernel's own fp32 sums.
        comparison.see("sum", 0, out_[0], partials, static_cast<double>(blocks_ + 1) * 0x1p-53 * partials);
    }

    double bytes() const override { return static_cast<double>(x_.bytes()); }

  private:
    static constexpr int elements = llmc::norm_block_elements;
    static constexpr double before = 0.5;
    std::int64_t blocks_;
    Array<X> x_;
    Array<float> partials_;
    Array<double> out_;
    Array<std::byte> workspace_;
};

const Registration registration({
    .name = "global_norm",
    .sizes = {"blocks of 1024"},
    .variants = {{1, "a thread does a block of 1024", {32, 128, 256}},
                 {2, "a thread block does it", {32, 128, 512}},
                 {3, "a warp does it, all loads in flight at once", {32, 256, 512}}},
    .checked = {{1}, {3}, {130}},
    .timed = {{121600}, {1521500}},
    .dtypes = {llmc::DType::bf16, llmc::DType::fp32},
    .takes = {},
    .make = make_problem<GlobalNorm, bf16, float>,
    .checked_for_races = {{34}},
});

}  // namespace lab::global_norm_variants
