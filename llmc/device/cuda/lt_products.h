// Matrix products by cuBLASLt. For each shape the library offers several algorithms. Which one computes it is chosen
// once: by time, among those that give the same bits each time, or as an earlier run chose.
#pragma once

#include <cublasLt.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/dtype.h"
#include "llmc/core/tensor.h"
#include "llmc/device/cuda/cuda_queues.h"

namespace llmc::cuda {

// A matrix X (rows, columns) in memory row by row; `transposed`: the operand is its transpose.
struct LtMatrix {
    const Tensor& data;
    std::int64_t rows, columns;
    bool transposed = false;
};

class LtProducts {
  public:
    // Enough for every algorithm on every chip (NVIDIA recommends it for Hopper).
    static constexpr std::size_t workspace_bytes = 32 << 20;

    // `gpu` names its kind in choices(). `tf32`: fp32 operands are rounded to TF32. `sync`: waits for each product.
    LtProducts(CudaQueues& queues, std::string gpu, bool tf32, bool sync);
    ~LtProducts();
    LtProducts(const LtProducts&) = delete;
    LtProducts& operator=(const LtProducts&) = delete;

    void set_workspace(void* workspace) { workspace_ = workspace; }

    // d (rows, columns), row by row, = a b + bias, or d += a b; sums are fp32. a and b of one dtype, d fp32 or theirs,
    // bias (columns) of theirs [optional]. Rows of memory are multiples of 16 bytes.
    void overwrite(const Tensor& d, const LtMatrix& a, const LtMatrix& b, const Tensor& bias);
    void accumulate(const Tensor& d, const LtMatrix& a, const LtMatrix& b);

    // Device::choices, adopt_choices, measure.
    std::string choices() const;
    void adopt_choices(std::string_view text);
    void measure(bool on) { measures_ = on; }

  private:
    // What the choice of an algorithm depends on, in cuBLASLt's terms: columns-first matrices,
    // D (m,n) = op(A) op(B).
    struct Key {
        std::int64_t m, n, k;
        bool transpose_a, transpose_b;
        DType in, out;
        bool bias, accumulate;
        std::array<int, 4> alignment;  // of A, B, D and the bias, in bytes
        auto operator<=>(const Key&) const = default;
    };
    struct Operands {
        const void *a, *b, *bias;
        void* d;
    };
    class Plan;

    static Key key_of(const Tensor& d, const LtMatrix& a, const LtMatrix& b, const Tensor& bias,
                      bool accumulate);
    static std::string name_of(const Key& key);
    void multiply(const Key& key, const Operands& operands);
    Plan& plan_for(const Key& key, const Operands& operands);
    std::vector<cublasLtMatmulAlgo_t> candidates(const Plan& plan) const;
    cublasLtMatmulAlgo_t fastest(const Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& candidates,
                                 const Operands& operands) const;
    std::string library() const;

    CudaQueues& queues_;
    std::string gpu_;
    bool tf32_, sync_;
    bool measures_ = false;
    cublasLtHandle_t handle_ = nullptr;
    void* workspace_ = nullptr;
    std::map<Key, std::unique_ptr<Plan>> plans_;
    std::map<std::string, cublasLtMatmulAlgo_t, std::less<>> adopted_;  // by name_of
};

}  // namespace llmc::cuda
