// Tensors as kernels see them, with CUDA's bf16 type.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "llmc/core/tensor.h"

namespace llmc::cuda {

// The elements on the device; null if an optional operand is absent.
template <class T>
T* elements(const Tensor& tensor) {
    if (!tensor) return nullptr;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        check(tensor.dtype == DType::bf16, "a tensor is read as its own type");
        return reinterpret_cast<__nv_bfloat16*>(tensor.data);
    } else {
        return tensor.as<T>();
    }
}

// Calls f<X>() with the kernels' type of a compute dtype.
template <class F>
decltype(auto) with_kernel_type(DType dtype, F&& f) {
    check(dtype == DType::fp32 || dtype == DType::bf16, "operations compute in fp32 or bf16");
    return dtype == DType::bf16 ? f.template operator()<__nv_bfloat16>() : f.template operator()<float>();
}

// Kernels count heads, batches and the elements of a row in int.
inline int to_int(std::int64_t size) {
    check(size >= 0 && size < std::int64_t{1} << 31, "a size fits into an int");
    return static_cast<int>(size);
}

}  // namespace llmc::cuda
