// The gradients of a matrix product without tensor cores: din = dout weight and dweight += dout^T in,
// together 4 N OC IC operations. The trainer uses cuBLASLt for them. They show the first and largest step of
// every product (dev/matmul_forward.cu continues to tensor cores):
//   1  A thread computes one element and reads 2 numbers for each multiplication: loads are the limit.
//   2  A block computes 64x64 elements from tiles in shared memory, a thread 4x4 of them: 8 numbers for 16
//      multiplications. A number that a block reads from memory serves 64 elements
//      (dev/matmul_backward.cuh). 4x4 of 64x64 need 256 threads: one block size.
#include "dev/matmul_backward.cuh"

#include "dev/lab/lab.h"
#include "dev/lab/matmul_shape.h"

namespace lab::matmul_backward_variants {

using namespace llmc::cuda;

template <class X, bool transposed>
__global__ void matmul_backward_kernel1(MatmulBackward<X, transposed> product) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= product.rows * product.columns) return;
    const std::int64_t row = i / product.columns;
    const int column = static_cast<int>(i % product.columns);
    float sum = 0;
    for (std::int64_t k = 0; k < product.depth; ++k) {
        const X a = transposed ? product.a[k * product.rows + row] : product.a[row * product.depth + k];
        sum += to_float(a) * to_float(product.b[k * product.columns + column]);
    }
    product.store_sum(row, column, sum);
}

template <class X>
class MatmulBackwardProblem : public Problem {
  public:
    MatmulBackwardProblem(const Shape& shape, Draw& draw) : MatmulBackwardProblem(MatmulShape(shape), draw) {}
    MatmulBackwardProblem(const MatmulShape& shape, Draw& draw)
        : rows_(shape.rows),
          out_channels_(static_cast<int>(shape.out_channels)),
          in_channels_(static_cast<int>(shape.in_channels)),
          dout_(rows_ * out_channels_),
          in_(rows_ * in_channels_),
          weight_(std::int64_t{out_channels_} * in_channels_),
          din_(rows_ * in_channels_),
          dweight_(weight_.size()),
          dweight_before_(weight_.size()) {
        draw.normal(dout_, 1);
        draw.normal(in_, 1);
        draw.normal(weight_, 0.5);
        draw.normal(dweight_before_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const MatmulBackward<X, true> of_weight{dweight_.data(), dout_.data(), in_.data(),
                                                out_channels_,   in_channels_, rows_};
        const MatmulBackward<X, false> of_in{din_.data(), dout_.data(), weight_.data(),
                                             rows_,       in_channels_, out_channels_};
        if (variant == 2) {
            llmc::cuda::matmul_backward<X>(on, din_.data(), dweight_.data(), dout_.data(), in_.data(),
                                           weight_.data(), rows_, out_channels_, in_channels_);
            return;
        }
        const auto blocks = [&](std::int64_t n) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(n, block_size));
        };
        launch(on, matmul_backward_kernel1<X, true>, blocks(dweight_.size()), block_size, 0, of_weight);
        launch(on, matmul_backward_kernel1<X, false>, blocks(din_.size()), block_size, 0, of_in);
    }

    void reset() override {
        din_.clear();
        dweight_.copy_from(dweight_before_);
    }

    // A sum of n products in fp32 has n roundings of sums and, without fused multiply-adds, n of products.
    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        for (std::int64_t i = 0; i < din_.size(); ++i) {
            const std::int64_t row = i / in_channels_, column = i % in_channels_;
            double sum = 0, magnitude = 0;
            for (int k = 0; k < out_channels_; ++k) {
                const double term = double{to_float(dout_[row * out_channels_ + k])} *
                                    to_float(weight_[std::int64_t{k} * in_channels_ + column]);
                sum += term;
                magnitude += std::fabs(term);
            }
            comparison.see("din", i, to_float(din_[i]), sum,
                           rounded<X>(sum, (out_channels_ + 1) * u * magnitude));
        }
        for (std::int64_t i = 0; i < dweight_.size(); ++i) {
            const std::int64_t row = i / in_channels_, column = i % in_channels_;
            double sum = dweight_before_[i], magnitude = std::fabs(sum);
            for (std::int64_t k = 0; k < rows_; ++k) {
                const double term = double{to_float(dout_[k * out_channels_ + row])} *
                                    to_float(in_[k * in_channels_ + column]);
                sum += term;
                magnitude += std::fabs(term);
            }
            comparison.see("dweight", i, dweight_[i], sum, static_cast<double>(rows_ + 2) * u * magnitude);
        }
    }

    double bytes() const override {
        return static_cast<double>(2 * dout_.bytes() + in_.bytes() + weight_.bytes() + din_.bytes() +
                                   2 * dweight_.bytes());
    }
    double flops() const override { return 4.0 * static_cast<double>(rows_) * out_channels_ * in_channels_; }

  private:
    std::int64_t rows_;
    int out_channels_, in_channels_;
    Array<X> dout_, in_, weight_, din_;
    Array<float> dweight_, dweight_before_;
};

const Registration registration({
    .name = "matmul_backward",
    .sizes = MatmulShape::sizes(),
    .variants = {{1, "one element a thread", {64, 256}},
                 {2, "64 x 64 tiles in shared memory, 4 x 4 sums a thread", {256}}},
    .checked = {{3, 16, 8}, {1, 40, 8}, {65, 24, 72}, {70, 104, 72}, {17, 72, 136}},
    .timed = {{4096, 768, 3072}},
    .dtypes = {llmc::DType::bf16, llmc::DType::fp32},
    .takes = {},
    .make = make_problem<MatmulBackwardProblem, bf16, float>,
    .checked_for_races = {{66, 72, 72}},
});

}  // namespace lab::matmul_backward_variants
