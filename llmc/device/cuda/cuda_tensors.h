// Tensors as the kernels know them: bf16 is CUDA's type there.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "llmc/core/tensor.h"

namespace llmc::cuda {

// The elements on the device; null where an optional operand is absent.
template <class T>
T* elements(const Tensor& tensor) {
    if (!tensor) return nullptr;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        check(tensor.dtype == DType::bf16, "a tensor is read as another type than its own");
        return reinterpret_cast<__nv_bfloat16*>(tensor.data);
    } else {
        return tensor.as<T>();
    }
}

// f<X>() with the kernels' type of a compute dtype.
template <class F>
decltype(auto) with_kernel_type(DType dtype, F&& f) {
    check(dtype == DType::fp32 || dtype == DType::bf16, "operations compute in fp32 or bf16");
    return dtype == DType::bf16 ? f.template operator()<__nv_bfloat16>() : f.template operator()<float>();
}

// Kernels count rows' elements, heads and batches in int.
inline int to_int(std::int64_t size) {
    check(size >= 0 && size < std::int64_t{1} << 31, "a size is larger than kernels count");
    return static_cast<int>(size);
}

}  // namespace llmc::cuda
