// Tensors as kernels see them, with CUDA's types of 16 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "llmc/core/tensor.h"

namespace llmc::cuda {

// The elements on the device; null if an optional operand is absent.
template <class T>
T* elements(const Tensor& tensor) {
    if (!tensor) return nullptr;
    constexpr bool is_bf16 = std::is_same_v<T, __nv_bfloat16>;
    if constexpr (is_bf16 || std::is_same_v<T, __half>) {
        check(tensor.dtype == (is_bf16 ? DType::bf16 : DType::fp16), "a tensor is read as its own type");
        return reinterpret_cast<T*>(tensor.data);
    } else {
        return tensor.as<T>();
    }
}

// Calls f<X>() with the kernels' type of a compute dtype.
template <class F>
decltype(auto) with_kernel_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::fp32:
            return f.template operator()<float>();
        case DType::bf16:
            return f.template operator()<__nv_bfloat16>();
        case DType::fp16:
            return f.template operator()<__half>();
        case DType::fp64:
        case DType::int32:
        case DType::uint8:
            break;
    }
    programming_error("operations compute in fp32, bf16 or fp16");
}

// The same for a buffer of gradients, which are kept in fp32 or bf16.
template <class F>
decltype(auto) with_gradient_type(DType dtype, F&& f) {
    check(dtype == DType::fp32 || dtype == DType::bf16, "gradients are kept in fp32 or bf16");
    return dtype == DType::bf16 ? f.template operator()<__nv_bfloat16>() : f.template operator()<float>();
}

// Kernels count heads, batches and the elements of a row in int.
inline int to_int(std::int64_t size) {
    check(size >= 0 && size < std::int64_t{1} << 31, "a size fits into an int");
    return static_cast<int>(size);
}

}  // namespace llmc::cuda
