// The gradient of a bias, in four variants: dbias[c] += the sum over N rows of dout[n][c] (llmc/device/ops.h,
// matmul_backward).
//
// There is one addition per element, so memory is the limit: N OC elements are read once, and the writes are
// negligible. Rows are contiguous, but sums go down the columns. A GPU needs neighboring threads to read
// neighboring bytes, and many bytes in flight: about 40 KB per multiprocessor to saturate the memory of an
// H100.
//   1  A block does a column; its threads go down the rows. Every load of a warp touches 32 lines for 2 bytes
//      each, and the other columns' blocks fetch the same lines again.
//   2  A warp reads 32 neighboring columns of a row. The warps of a block take rows in turn; their sums are
//      added in shared memory. Each line is fetched once, but a thread's load has 2 bytes.
//   3  16-byte loads: eight lanes read a line of 128 bytes, a warp reads four rows of it. But there are too
//      few blocks: 768 channels are 12 blocks of columns, for 132 multiprocessors.
//   4  The rows are divided into slices, so that the blocks fill the chip. Their sums go to memory, and a
//      second small kernel adds the slices in order: no atomics, the same bits each run
//      (llmc/device/cuda/bias_gradient.cuh).
#include "llmc/device/cuda/bias_gradient.cuh"

#include "dev/lab/lab.h"

namespace lab::bias_gradient_variants {

using namespace llmc::cuda;

template <class X>
__global__ void bias_gradient_kernel1(float* dbias, const X* dout, std::int64_t rows, int columns) {
    const int column = static_cast<int>(blockIdx.x);
    float sum = 0;
    for (std::int64_t row = threadIdx.x; row < rows; row += blockDim.x) {
        sum += to_float(dout[row * columns + column]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) dbias[column] += sum;
}

template <class X>
__global__ void bias_gradient_kernel2(float* dbias, const X* dout, std::int64_t rows, int columns) {
    SHARED(float, sums, [warp_threads][warp_threads]);
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int column = static_cast<int>(blockIdx.x) * warp_threads + lane;
    float sum = 0;
    if (column < columns) {
        for (std::int64_t row = warp; row < rows; row += warps) sum += to_float(dout[row * columns + column]);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= columns) return;
    float total = 0;
    for (int w = 0; w < warps; ++w) total += sums[w][lane];
    dbias[column] += total;
}

template <class X>
__global__ void bias_gradient_kernel3(float* dbias, const X* dout, std::int64_t rows, int columns) {
    constexpr int pack = Packed<X>::size, width = bias_gradient_columns<X>;
    SHARED(float, sums, [warp_threads][width]);
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int column_in_block = lane % bias_gradient_lanes * pack;
    const int column = static_cast<int>(blockIdx.x) * width + column_in_block;
    float sum[pack] = {};
    if (column < columns) {
        for (std::int64_t row = threadIdx.x / bias_gradient_lanes; row < rows;
             row += blockDim.x / bias_gradient_lanes) {
            const Packed<X> piece = load(dout + row * columns + column);
            for (int i = 0; i < pack; ++i) sum[i] += to_float(piece[i]);
        }
    }
    for (int i = 0; i < pack; ++i) {
        sum[i] += __shfl_xor_sync(all_lanes, sum[i], 16);
        sum[i] += __shfl_xor_sync(all_lanes, sum[i], 8);
        if (lane < bias_gradient_lanes) sums[warp][column_in_block + i] = sum[i];
    }
    __syncthreads();
    for (int own = static_cast<int>(threadIdx.x); own < width; own += static_cast<int>(blockDim.x)) {
        const int own_column = static_cast<int>(blockIdx.x) * width + own;
        if (own_column >= columns) return;
        float total = 0;
        for (int w = 0; w < warps; ++w) total += sums[w][own];
        dbias[own_column] += total;
    }
}

template <class X>
class BiasGradient : public Problem {
  public:
    BiasGradient(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          columns_(static_cast<int>(shape[1])),
          dout_(rows_ * columns_),
          before_(columns_),
          dbias_(columns_) {
        draw.normal(dout_, 1, 0.1);
        draw.normal(before_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto columns_a_block = [&](auto kernel, int n) {
            launch(on, kernel, static_cast<unsigned>(blocks_for(columns_, n)), block_size, 0, dbias_.data(),
                   dout_.data(), rows_, columns_);
        };
        switch (variant) {
            case 1:
                return columns_a_block(bias_gradient_kernel1<X>, 1);
            case 2:
                return columns_a_block(bias_gradient_kernel2<X>, warp_threads);
            case 3:
                return columns_a_block(bias_gradient_kernel3<X>, bias_gradient_columns<X>);
            case 4:
                return block_size == 128 ? run_best<4>(on) : run_best<8>(on);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { dbias_.copy_from(before_); }

    void compare(Comparison& comparison) override {
        for (int c = 0; c < columns_; ++c) {
            double sum = before_[c], magnitude = std::fabs(before_[c]);
            for (std::int64_t row = 0; row < rows_; ++row) {
                sum += to_float(dout_[row * columns_ + c]);
                magnitude += std::fabs(to_float(dout_[row * columns_ + c]));
            }
            // There are `rows` additions, including the one to the old value.
            const auto n = static_cast<double>(rows_);
            comparison.see("dbias", c, dbias_[c], sum, n * unit_roundoff<float> * magnitude);
        }
    }

    double bytes() const override { return static_cast<double>(dout_.bytes()); }

  private:
    template <int warps>
    void run_best(const LaunchContext& on) {
        const std::size_t bytes = bias_gradient_workspace_bytes<X, warps>(on.chip, rows_, columns_);
        if (!workspace_ || workspace_->bytes() < bytes) {
            workspace_ = std::make_unique<Array<std::byte>>(static_cast<std::int64_t>(bytes));
        }
        bias_gradient<X, warps>(on, dbias_.data(), dout_.data(), rows_, columns_, workspace_->data());
    }

    std::int64_t rows_;
    int columns_;
    Array<X> dout_;
    Array<float> before_, dbias_;
    std::unique_ptr<Array<std::byte>> workspace_;
};

const Registration registration({
    .name = "bias_gradient",
    .sizes = {"rows", "columns"},
    .variants = {{1, "a block does a column", {32, 128, 512}},
                 {2, "a warp reads columns side by side", {32, 128, 512}},
                 {3, "16-byte loads", {32, 128, 512}},
                 {4, "slices of rows fill the chip", {128, 256}}},
    .checked = {{5, 8}, {1, 72}, {130, 136}, {1037, 40}},
    .timed = {{8192, 768}, {8192, 3072}, {65536, 1600}},
    .takes = {},
    .make = make_problem<BiasGradient>,
    .checked_for_races = {{70, 72}},
});

}  // namespace lab::bias_gradient_variants
