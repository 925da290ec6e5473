// Matrix products by oneDNN.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "llmc/core/tensor.h"

namespace llmc::cpu {

// A matrix in memory, fp32 or bf16. Element (i, j) is row_stride * i + column_stride * j elements from the
// start. One of the strides is 1.
struct Matrix {
    std::byte* data;
    DType dtype;
    std::int64_t rows, columns;
    std::int64_t row_stride, column_stride;

    // A tensor (..., columns) as a matrix with that many columns.
    explicit Matrix(const Tensor& tensor);
    Matrix(float* values, std::int64_t row_count, std::int64_t column_count);

    Matrix transposed() const;
    Matrix part(std::int64_t first_row, std::int64_t row_count, std::int64_t first_column,
                std::int64_t column_count) const;
};

enum class Into { overwrite, accumulate };

// True if this processor has bf16 instructions and oneDNN may use them (ONEDNN_MAX_CPU_ISA can forbid it).
bool processor_has_bf16();

class Products {
  public:
    explicit Products(int threads);
    ~Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    // c = scale a b (+ bias, one per column of c, in a's dtype), or c += scale a b. Sums are in fp32 and are rounded to
    // c's dtype. a and b are both fp32 or both bf16; c has their dtype or fp32. If a has no columns,
    // `into` must be Into::accumulate. The bits of c do not depend on the number of threads.
    void multiply(const Matrix& c, const Matrix& a, const Matrix& b, Into into = Into::overwrite,
                  const std::byte* bias = nullptr, float scale = 1);

  private:
    // A primitive is compiled for its shapes, strides and dtypes. It is kept for the next call that has the
    // same.
    using Key = std::array<std::int64_t, 13>;
    struct Primitive;
    struct Engine;
    Primitive& primitive(const Matrix& c, const Matrix& a, const Matrix& b, Into into, bool has_bias,
                         float scale);
    void run(const Matrix& c, const Matrix& a, const Matrix& b, Into into, const std::byte* bias, float scale,
             bool may_be_divided);
    // In tiles that depend on the shape of c alone, each by one thread.
    void run_tiles(const Matrix& c, const Matrix& a, const Matrix& b, Into into, const std::byte* bias,
                   float scale);

    int threads_;
    std::vector<std::unique_ptr<Products>> of_one_thread_;
    std::unique_ptr<Engine> engine_;
    std::map<Key, std::unique_ptr<Primitive>> primitives_;
};

}  // namespace llmc::cpu
