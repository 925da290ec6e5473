// Shared by the parts of cuBLASLt on the CPU: descriptions, as the attributes that were set, and algorithms.
//   cublaslt_descriptions.cpp  descriptions of products, matrices and preferences
//   cublaslt_algorithms.cpp    candidates, and what they refuse
//   cublaslt_product.cpp       the product
#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>

#include "simt/runtime/runtime.h"

namespace simt::runtime {

// Values of up to 8 bytes, identified by number. Each has its own size.
class Attributes {
  public:
    struct Attribute {
        int number;
        std::size_t bytes;
        std::uint64_t value;
    };
    Attributes(std::initializer_list<Attribute> attributes);

    cublasStatus_t set(int number, const void* from, std::size_t bytes);
    cublasStatus_t get(int number, void* to, std::size_t bytes, std::size_t* written) const;

    template <class T>
    T as(int number) const {
        T value{};
        std::memcpy(&value, &attributes_.at(number).value, sizeof(T));
        return value;
    }

  private:
    std::map<int, Attribute> attributes_;
};

// The type that the handles point to.
struct MatmulDescription {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    Attributes attributes;
};
MatmulDescription* of(cublasLtMatmulDesc_t handle);
Attributes* of(cublasLtMatrixLayout_t handle);
Attributes* of(cublasLtMatmulPreference_t handle);

inline bool is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
inline std::size_t size_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2; }

// A matrix in memory, in column-major order.
struct Layout {
    cudaDataType_t type;
    std::int64_t rows, columns, leading;

    std::size_t element_bytes() const { return size_of(type); }
    std::size_t bytes() const;
};
Layout layout_of(const Attributes& attributes);

// D (m, n) = epilogue(alpha op(A) (m, k) op(B) (k, n) + beta C).
struct Problem {
    MatmulDescription description;
    bool transpose_a, transpose_b;
    cublasLtEpilogue_t epilogue;
    Layout a, b, c, d;
    std::int64_t m, n, k;
};
// Refuses what cuBLASLt refuses for every algorithm.
cublasStatus_t make_problem(cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a,
                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                            Problem* problem);

// Speed of an algorithm, by the clock of events.
enum class Speed { takes_no_time, as_it_is, slow };

// The content of a cublasLtMatmulAlgo_t.
struct Algorithm {
    std::int32_t id;
    std::int32_t splits = 1;
    std::uint32_t tile = 0, reduction = CUBLASLT_REDUCTION_SCHEME_NONE, swizzling = 0, option = 0, stages = 0;
    std::uint16_t inner_shape = 0, cluster_shape = 0;
    std::array<std::uint16_t, 5> alignment = {256, 256, 256, 256,
                                              256};  // required of A, B, C, D, bias, in bytes

    std::size_t workspace_bytes(const Problem& problem) const;
    Speed speed() const;
    bool fails() const;   // when it runs
    bool varies() const;  // an element's last bit, each time
};
Algorithm algorithm_in(const cublasLtMatmulAlgo_t& algo);
// Checks that the algorithm exists with this configuration.
cublasStatus_t check_algorithm(const Algorithm& algorithm);

// Runs the body of an API function that returns a cublasStatus_t.
template <class Body>
cublasStatus_t cublas_call(const Body& body) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const cudaError_t error = api_call([&](Runtime& r) {
        status = body(r);
        return cudaSuccess;
    });
    if (error == cudaErrorInsufficientDriver) return CUBLAS_STATUS_NOT_INITIALIZED;
    return error == cudaSuccess ? status : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace simt::runtime
