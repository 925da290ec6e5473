// The matrix product out = in weight^T + bias, in six variants (llmc/device/ops.h), with N rows, IC input and
// OC output channels.
//
// There are 2 N OC IC operations on N IC + OC IC + N OC elements. At 8192 x 768 x 3072 in bf16 that is 39
// GFLOP on 68 MB, 570 operations per byte. From 200 to 300 on, arithmetic is the limit of an A100 or H100. So
// HBM must be read about once, and what counts is the traffic between the levels above it. Each variant feeds
// the multipliers from a nearer level.
//   1  A thread computes one element from global memory: two loads for each multiplication, which the caches
//      cannot deliver.
//   2  32x32 tiles in shared memory: an element that was fetched serves 32 threads. Shared memory is now the
//      limit: there are still two loads for each multiplication.
//   3  128x128 tiles, and 8x8 elements per thread: 16 loads from shared memory (four of 16 bytes) for 64
//      multiplications; the next tile is fetched meanwhile. The best for fp32 (dev/matmul.cuh):
//      the FMA units are the limit, 19.5 TFLOP/s on an A100 and 67 on an H100.
//   4  bf16 on tensor cores: a warp multiplies 16x16 by 16x8 in one instruction, and loads fragments for it
//      with ldmatrix. An A100 has 312 TFLOP/s by its datasheet. The rows of a tile are 64 bytes apart, so
//      that the 8 rows that ldmatrix reads at a time are in a quarter of the banks: it takes four times as
//      long.
//   5  Swizzled: chunks of 16 bytes are permuted depending on the row. No two rows of an ldmatrix share a
//      bank.
//   6  Nothing waits: cp.async fetches three tiles ahead, bypassing the registers. Fragments are loaded a
//      step ahead. Tiles that run together share operands in L2. Results are stored in rows of 128 bytes. A
//      warp has 64x64 elements: 4 KB of fragments for 64 Ki multiplications, half of what shared memory
//      delivers in the time that an A100's tensor cores take for them. (dev/matmul.cuh)
// Blocks of 256 threads (4 to 6) compute 256x128 elements. They fetch three tiles where two blocks of 128
// threads fetch four, but eight warps wait for one another. Variant 3 has one block size, since two of its
// threads fetch a row of its tile. Hopper's tensor cores need wgmma for their full rate. By published
// measurements mma.sync reaches about 60% of it.
#include "dev/matmul.cuh"

#include "dev/lab/lab.h"
#include "dev/lab/matmul_shape.h"

namespace lab::matmul_forward_variants {

using namespace llmc::cuda;

template <class X>
__device__ __forceinline__ X with_bias(const MatmulForward<X>& p, float sum, int column) {
    return from_float<X>(sum + (p.bias ? to_float(p.bias[column]) : 0));
}

template <class X>
__global__ void matmul_forward_kernel1(MatmulForward<X> p) {
    const std::int64_t element = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const std::int64_t row = element / p.out_channels;
    const int column = static_cast<int>(element % p.out_channels);
    if (row >= p.rows) return;
    float sum = 0;
    for (int k = 0; k < p.in_channels; ++k) {
        sum += to_float(p.in[row * p.in_channels + k]) *
               to_float(p.weight[std::int64_t{column} * p.in_channels + k]);
    }
    p.out[element] = with_bias(p, sum, column);
}

// A block computes 32x32 elements. A thread computes one, or several in a column if the block has fewer
// threads.
template <class X, int threads>
__global__ void __launch_bounds__(threads) matmul_forward_kernel2(MatmulForward<X> p) {
    constexpr int edge = 32, step = threads / edge;
    SHARED(float, a, [edge][edge + 1]);  // with rows of 33, a column is in 32 different banks
    SHARED(float, b, [edge][edge + 1]);
    const int x = static_cast<int>(threadIdx.x) % edge, y = static_cast<int>(threadIdx.x) / edge;
    const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * edge;
    const int first_column = static_cast<int>(blockIdx.y) * edge;
    float sums[edge / step] = {};
    for (int first = 0; first < p.in_channels; first += edge) {
        const int k = first + x;
        for (int i = y; i < edge; i += step) {
            const std::int64_t row = first_row + i, column = first_column + i;
            const bool inside = k < p.in_channels;
            a[i][x] = inside && row < p.rows ? to_float(p.in[row * p.in_channels + k]) : 0;
            b[i][x] = inside && column < p.out_channels ? to_float(p.weight[column * p.in_channels + k]) : 0;
        }
        __syncthreads();
        for (int j = 0; j < edge; ++j) {
            for (int i = 0; i < edge / step; ++i) sums[i] += a[y + i * step][j] * b[x][j];
        }
        __syncthreads();
    }
    const int column = first_column + x;
    if (column >= p.out_channels) return;
    for (int i = 0; i < edge / step; ++i) {
        const std::int64_t row = first_row + y + i * step;
        if (row < p.rows) p.out[row * p.out_channels + column] = with_bias(p, sums[i], column);
    }
}

struct Unswizzled {
    __device__ __forceinline__ int operator()(int row, int chunk) const {
        return row * llmc::cuda::detail::tile_depth + chunk * 8;
    }
};

// Fetch, wait, compute, wait: the tensor cores of a block are idle while it fetches.
template <int threads, class Place>
__device__ __forceinline__ void matmul_with_tensor_cores(const MatmulForward<bf16>& p, Place place) {
    using namespace llmc::cuda::detail;
    SharedAllocator shared;
    bf16* const a = shared.take<bf16>(threads * tile_depth);
    bf16* const b = shared.take<bf16>(matmul_tile * tile_depth);
    const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * threads;
    const int first_column = static_cast<int>(blockIdx.y) * matmul_tile;
    const int to = place(fetched_row(), fetched_chunk());
    const RowsOfThread<bf16> of_a(p.in, first_row, p.rows, p.in_channels, fetched_row(), fetched_chunk() * 8,
                                  threads);
    const RowsOfThread<bf16> of_b(p.weight, first_column, p.out_channels, p.in_channels, fetched_row(),
                                  fetched_chunk() * 8);

    constexpr int apart = threads / 4;
    const auto fetch = [&]<int rows>(bf16* tile, const RowsOfThread<bf16>& of, int k) {
        const bool inside = k + fetched_chunk() * 8 < p.in_channels;
        Packed<bf16> fetched[rows / apart];
#pragma unroll
        for (int i = 0; i < rows / apart; ++i) {
            fetched[i] = inside && i * apart < of.left
                             ? load(of.from + k + i * std::int64_t{apart} * p.in_channels)
                             : from_bits<bf16>(uint4{});
        }
#pragma unroll
        for (int i = 0; i < rows / apart; ++i) store(tile + to + i * apart * tile_depth, fetched[i]);
    };

    Sums sums = {};
    Fragments fragments;
    for (int channel = 0; channel < p.in_channels; channel += tile_depth) {
        fetch.template operator()<threads>(a, of_a, channel);
        fetch.template operator()<matmul_tile>(b, of_b, channel);
        __syncthreads();
#pragma unroll
        for (int step = 0; step < tile_depth / 16; ++step) {
            load_fragments(fragments, a, b, step, place);
            multiply(sums, fragments);
        }
        __syncthreads();
    }

    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = first_column + warp_column() + j * 8 + lane % 4 * 2;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const std::int64_t row = first_row + warp_row() + i * 16 + half * 8 + lane / 4;
                if (row >= p.rows || column >= p.out_channels) continue;
                bf16* const out = p.out + row * p.out_channels + column;
                out[0] = with_bias(p, sums[i][j][half * 2], column);
                out[1] = with_bias(p, sums[i][j][half * 2 + 1], column + 1);
            }
        }
    }
}

template <int threads>
__global__ void __launch_bounds__(threads, 256 / threads)
    matmul_forward_kernel4(MatmulForward<bf16> product) {
    matmul_with_tensor_cores<threads>(product, Unswizzled{});
}

template <int threads>
__global__ void __launch_bounds__(threads, 256 / threads)
    matmul_forward_kernel5(MatmulForward<bf16> product) {
    matmul_with_tensor_cores<threads>(product, llmc::cuda::detail::Swizzled{});
}

template <class X>
class MatmulForwardProblem : public Problem {
  public:
    MatmulForwardProblem(const Shape& shape, Draw& draw) : MatmulForwardProblem(MatmulShape(shape), draw) {}
    MatmulForwardProblem(const MatmulShape& shape, Draw& draw)
        : rows_(shape.rows),
          in_channels_(static_cast<int>(shape.in_channels)),
          out_channels_(static_cast<int>(shape.out_channels)),
          in_(rows_ * in_channels_),
          weight_(std::int64_t{out_channels_} * in_channels_),
          bias_(out_channels_),
          out_(rows_ * out_channels_) {
        draw.normal(in_, 1);
        draw.normal(weight_, 0.5);
        draw.normal(bias_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const MatmulForward<X> product{out_.data(), in_.data(),    weight_.data(), bias_.data(),
                                       rows_,       out_channels_, in_channels_};
        const auto tiles = [&](int rows, int columns) {
            return dim3(static_cast<unsigned>(blocks_for<std::int64_t>(rows_, rows)),
                        static_cast<unsigned>(blocks_for(out_channels_, columns)));
        };
        switch (variant) {
            case 1:
                return launch(on, matmul_forward_kernel1<X>,
                              static_cast<unsigned>(blocks_for<std::int64_t>(out_.size(), block_size)),
                              block_size, 0, product);
            case 2:
                return launch(
                    on, block_size == 256 ? matmul_forward_kernel2<X, 256> : matmul_forward_kernel2<X, 1024>,
                    tiles(32, 32), block_size, 0, product);
            case 3:
                return launch(on, matmul_forward_kernel3<X>, matmul_blocks(product), block_size, 0, product);
            default:
                break;
        }
        if constexpr (std::is_same_v<X, bf16>) {
            const auto launch_tiles = [&](auto kernel) {
                const int elements = llmc::cuda::detail::tile_elements(block_size);
                launch(on, kernel, tiles(block_size, matmul_tile), block_size,
                       SharedAllocator::bytes<bf16>(static_cast<std::size_t>(elements)), product);
            };
            switch (variant) {
                case 4:
                    return launch_tiles(block_size == 128 ? matmul_forward_kernel4<128>
                                                          : matmul_forward_kernel4<256>);
                case 5:
                    return launch_tiles(block_size == 128 ? matmul_forward_kernel5<128>
                                                          : matmul_forward_kernel5<256>);
                case 6:
                    return llmc::cuda::matmul_forward<X>(on, out_.data(), in_.data(), weight_.data(),
                                                         bias_.data(), rows_, out_channels_, in_channels_,
                                                         block_size);
                default:
                    break;
            }
        }
        llmc::programming_error("no such variant");
    }

    void reset() override { out_.clear(); }

    void compare(Comparison& comparison) override {
        if (expected_.empty()) compute_expected();
        for (std::int64_t i = 0; i < out_.size(); ++i) {
            const auto [value, error] = expected_[static_cast<std::size_t>(i)];
            comparison.see("out", i, to_float(out_[i]), value, rounded<X>(value, error));
        }
    }

    double bytes() const override {
        return static_cast<double>(in_.bytes() + weight_.bytes() + bias_.bytes() + out_.bytes());
    }
    double flops() const override { return 2.0 * static_cast<double>(rows_) * out_channels_ * in_channels_; }

  private:
    struct Element {
        double value, error;
    };

    // IC products and the bias. With rounding: u for each product (exact in bf16) and each addition. Tensor
    // cores take four products (or more) and the sum so far. They shift them to the exponent of the largest,
    // truncate, add, and truncate again: 6 times 2 u for 4 products. So the bound is 3 u per term for every
    // variant.
    void compute_expected() {
        for (std::int64_t row = 0; row < rows_; ++row) {
            for (std::int64_t column = 0; column < out_channels_; ++column) {
                double sum = to_float(bias_[column]), magnitude = std::fabs(sum);
                for (int k = 0; k < in_channels_; ++k) {
                    const double product = double{to_float(in_[row * in_channels_ + k])} *
                                           to_float(weight_[column * in_channels_ + k]);
                    sum += product;
                    magnitude += std::fabs(product);
                }
                expected_.push_back({sum, 3 * (in_channels_ + 2) * unit_roundoff<float> * magnitude});
            }
        }
    }

    std::int64_t rows_;
    int in_channels_, out_channels_;
    Array<X> in_, weight_, bias_, out_;
    std::vector<Element> expected_;
};

const Registration registration({
    .name = "matmul_forward",
    .sizes = MatmulShape::sizes(),
    .variants = {{1, "one element a thread", {64, 256}},
                 {2, "32x32 tiles in shared memory", {256, 1024}},
                 {3, "8x8 elements a thread", {256}},
                 {4, "tensor cores", {128, 256}},
                 {5, "without bank conflicts", {128, 256}},
                 {6, "a pipeline of cp.async", {128, 256}}},
    .checked = {{3, 8, 16}, {1, 40, 8}, {130, 200, 136}, {257, 64, 264}, {64, 168, 128}},
    .timed = {{8192, 768, 768}, {8192, 768, 3072}, {8192, 3072, 768}, {8192, 768, 50304}},
    .dtypes = {llmc::DType::bf16, llmc::DType::fp32},
    .takes = [](int variant, llmc::DType dtype,
                const Shape&) { return variant <= 3 || dtype == llmc::DType::bf16; },
    .make = make_problem<MatmulForwardProblem, bf16, float>,
    .checked_for_races = {{34, 72, 136}, {130, 8, 8}},
});

}  // namespace lab::matmul_forward_variants
