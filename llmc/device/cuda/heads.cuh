// Heads in the rows of tensors (llmc/device/heads.h), as kernels see them.
#pragma once

#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/heads.h"

namespace llmc::cuda {

// `first` is the first head of the first row; rows lie `stride` elements apart.
template <class T>
struct HeadPlaces {
    T* first;
    std::int64_t stride;

    // Element `element` of head `head` of this row.
    __device__ __forceinline__ T* at(unsigned row, int head, int size, int element) const {
        return first + row * stride + (head * size + element);
    }
};

template <class X>
HeadPlaces<X> places(const Heads& heads) {
    if (!heads.rows) return {nullptr, 0};
    return {elements<std::remove_const_t<X>>(heads.rows) + heads.first, row_elements(heads)};
}

// True if every head begins at a multiple of 16 bytes.
template <class X>
bool has_whole_packs(const HeadPlaces<X>& heads, int size) {
    constexpr int pack = Packed<std::remove_const_t<X>>::size;
    return reinterpret_cast<std::uintptr_t>(heads.first) % 16 == 0 && heads.stride % pack == 0 &&
           size % pack == 0;
}

// Kernels count heads in 32 bits.
inline unsigned count_heads(std::int64_t rows, int heads) {
    check(rows * heads < std::int64_t{1} << 31, "a call has less than 2^31 heads");
    return static_cast<unsigned>(rows * heads);
}

}  // namespace llmc::cuda
