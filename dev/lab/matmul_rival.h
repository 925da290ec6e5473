// The trainer's matrix products by cuBLASLt (llmc/device/cuda/lt_products.h), at a shape of the lab, with
// their own random operands in device memory.
#pragma once

#include <memory>
#include <vector>

#include "dev/lab/matmul_shape.h"
#include "llmc/core/tensor.h"
#include "llmc/device/cuda/cuda_streams.h"
#include "llmc/device/cuda/lt_products.h"

namespace lab {

class MatmulRival {
  public:
    // fp32 operands are not rounded to TF32. The first run tries cuBLASLt's algorithms; later runs use the
    // fastest.
    MatmulRival(llmc::DType dtype, const MatmulShape& shape);

    void forward();   // out = in weight^T + bias
    void backward();  // dweight += dout^T in, din = dout weight
    // The stream of both products
    cudaStream_t stream() const { return streams_.selected(); }

    // `out` also serves as dout; it starts with random values like the others.
    const llmc::Tensor& in() const { return in_; }
    const llmc::Tensor& weight() const { return weight_; }
    const llmc::Tensor& bias() const { return bias_; }
    const llmc::Tensor& out() const { return out_; }
    const llmc::Tensor& din() const { return din_; }
    const llmc::Tensor& dweight() const { return dweight_; }

  private:
    struct Free {
        void operator()(std::byte* memory) const { cudaFree(memory); }
    };
    std::byte* allocate(std::size_t bytes);
    llmc::Tensor draw(llmc::DType dtype, const llmc::Shape& shape);

    MatmulShape shape_;
    std::vector<std::unique_ptr<std::byte, Free>> memory_;
    llmc::cuda::CudaStreams streams_;
    llmc::cuda::LtProducts products_;
    llmc::Tensor in_, weight_, bias_, out_, din_, dweight_;
};

}  // namespace lab
