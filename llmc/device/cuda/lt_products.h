// Matrix products by cuBLASLt, which offers several algorithms for each shape. The algorithm is chosen once
// per shape. It is the fastest of those that run and give the same bits each time, or the choice of an earlier run.
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
#include "llmc/device/cuda/cuda_streams.h"
#include "llmc/device/cuda/launch.h"
#include "llmc/device/cuda/workspace.h"
#include "llmc/device/device.h"
#include "llmc/device/fp8.h"

namespace llmc::cuda {

// How the bytes of a matrix in 8 bits are numbers: those of the format, times `scale` fp32 (1).
struct LtBytes {
    Fp8 format;
    const Tensor& scale;
};
// A matrix X (rows, columns) in row-major order, or one in 8 bits. If `transposed`, the operand is its transpose. It
// may be columns, from `first` on, of rows of `row` elements.
struct LtMatrix {
    const Tensor& data;
    std::int64_t rows, columns;
    bool transposed = false;
    std::optional<LtBytes> bytes{};
    std::int64_t first = 0, row = columns;

    std::byte* begin() const { return data.data + first * static_cast<std::int64_t>(size_of(data.dtype)); }
};

class LtProducts {
  public:
    // Enough for every algorithm on every chip: the size that NVIDIA recommends for Hopper.
    static constexpr std::size_t workspace_bytes = product_workspace_bytes;

    // `gpu` names the kind of GPU in choices(). `tf32` rounds fp32 operands to TF32. `sync` waits for each
    // product.
    LtProducts(CudaStreams& streams, std::string gpu, const Chip& chip, bool tf32, bool sync);
    ~LtProducts();
    LtProducts(const LtProducts&) = delete;
    LtProducts& operator=(const LtProducts&) = delete;

    void set_workspace(void* workspace) { workspace_ = workspace; }

    // d = a b + bias, or d += scale a b, with d (rows, columns) in row-major order; sums are in fp32. a, b and
    // bias (columns) [optional] have one dtype; d has that dtype or fp32. If a and b are in 8 bits, b alone is
    // transposed, their rows and d's are multiples of 16 bytes, bias is bf16 and d bf16 or fp32; needs sm_89.
    void overwrite(const Tensor& d, const LtMatrix& a, const LtMatrix& b, const Tensor& bias);
    void accumulate(const Tensor& d, const LtMatrix& a, const LtMatrix& b);
    void accumulate(const LtMatrix& d, const LtMatrix& a, const LtMatrix& b, float scale);

    // See Device::choices, adopt_choices and set_autotuning.
    std::string choices() const;
    void adopt_choices(std::string_view text);
    void set_autotuning(bool on) { measures_ = on; }
    const LeftOut& left_out() const { return left_out_; }

  private:
    // The choice of an algorithm depends on these. They are in cuBLASLt's terms: D (m,n) = op(A) op(B), with
    // column-major matrices.
    struct Key {
        std::int64_t m, n, k;
        bool transpose_a, transpose_b;
        cudaDataType_t a, b, d;
        bool bias, accumulate;
        std::array<int, 4> alignment;         // alignments of A, B, D and the bias, in bytes
        std::array<std::int64_t, 3> leading;  // elements from a column of A, B and D to the next
        auto operator<=>(const Key&) const = default;
    };
    struct Operands {
        const void *a, *b, *bias;
        void* d;
        const void *scale_a, *scale_b;  // for factors in 8 bits
        float scale;
    };
    class Plan;

    static Key key_of(const LtMatrix& d, const LtMatrix& a, const LtMatrix& b, const Tensor& bias,
                      bool accumulate);
    static std::string name_of(const Key& key);
    // The elements from the first to the last of A, B or D, others between its columns included.
    static std::int64_t extent_of_a(const Key& key);
    static std::int64_t extent_of_b(const Key& key);
    static std::size_t bytes_of_result(const Key& key);
    void multiply(const LtMatrix& d, const LtMatrix& a, const LtMatrix& b, const Tensor& bias,
                  bool accumulate, float scale);
    Plan& plan_for(const Key& key, const Operands& operands);
    cublasLtMatmulAlgo_t fastest(const Plan& plan, const Operands& operands);
    // The median of the milliseconds that an algorithm takes; empty if it fails, or gives other bits each time.
    std::optional<float> measure(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                                 const Operands& operands);
    std::uint64_t checksum_of(const void* data, std::size_t bytes, const std::string& call,
                              unsigned ignored = 0) const;
    bool make_up_zeros(const void* factor, std::int64_t elements, cudaDataType_t type,
                       const std::string& call) const;
    void clear(const void* factor, std::int64_t elements, cudaDataType_t type) const;
    [[noreturn]] void refuse(const Key& key, const std::string& why) const;
    std::string library() const;

    CudaStreams& streams_;
    std::string gpu_;
    Chip chip_;
    bool tf32_, sync_;
    bool measures_ = false;
    LeftOut left_out_;
    std::string last_status_;  // of those that failed
    cublasLtHandle_t handle_ = nullptr;
    void* workspace_ = nullptr;
    std::map<Key, std::unique_ptr<Plan>> plans_;
    std::map<std::string, cublasLtMatmulAlgo_t, std::less<>> adopted_;  // by name_of
};

}  // namespace llmc::cuda
