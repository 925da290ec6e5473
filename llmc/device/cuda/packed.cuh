// Packs of sixteen bytes, the size that a thread should load and store at a time, and conversions from and to
// fp32.
#pragma once

#include <cstring>
#include <type_traits>

#include "llmc/device/cuda/kernel.cuh"

namespace llmc::cuda {

__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__host__ __device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__host__ __device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

// Rounds to nearest, ties to even.
template <class X>
__host__ __device__ __forceinline__ X from_float(float x);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__host__ __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__host__ __device__ __forceinline__ fp16 from_float<fp16>(float x) {
    return __float2half_rn(x);
}

// Two floats rounded to a pair of bf16 or fp16, in one instruction; `low` is in the lower half.
template <class X>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
    static_assert(std::is_same_v<X, bf16> || std::is_same_v<X, fp16>);
    std::uint32_t bits;
    const auto copy = [&bits](const auto& pair) {
        static_assert(sizeof pair == sizeof bits);
        memcpy(static_cast<void*>(&bits), static_cast<const void*>(&pair), sizeof bits);
    };
    if constexpr (std::is_same_v<X, bf16>) {
        copy(__floats2bfloat162_rn(low, high));
    } else {
        copy(__floats2half2_rn(low, high));
    }
    return bits;
}

template <class X>
struct alignas(16) Packed {
    static constexpr int size = 16 / sizeof(X);
    X values[size];

    __device__ __forceinline__ X& operator[](int i) { return values[i]; }
    __device__ __forceinline__ const X& operator[](int i) const { return values[i]; }
};

// Rounds each element to nearest.
template <class X>
__device__ __forceinline__ Packed<X> packed_from(const float (&x)[Packed<X>::size]) {
    Packed<X> packed;
#pragma unroll
    for (int i = 0; i < Packed<X>::size; i += 2) {
        if constexpr (sizeof(X) == 2) {
            const std::uint32_t pair = pack_pair<X>(x[i], x[i + 1]);
            memcpy(static_cast<void*>(&packed[i]), static_cast<const void*>(&pair), sizeof pair);
        } else {
            packed[i] = from_float<X>(x[i]);
            packed[i + 1] = from_float<X>(x[i + 1]);
        }
    }
    return packed;
}

// Convert between a pack and its bits.
template <class X>
__device__ __forceinline__ Packed<X> from_bits(uint4 bits) {
    Packed<X> packed;
    memcpy(&packed, &bits, sizeof bits);
    return packed;
}
template <class X>
__device__ __forceinline__ uint4 to_bits(const Packed<X>& packed) {
    uint4 bits;
    memcpy(&bits, &packed, sizeof bits);
    return bits;
}

// Makes the compiler convert these elements again from their sixteen bytes when they are next used. Otherwise
// it would keep the conversions in registers.
template <class X>
__device__ __forceinline__ void forget_conversions([[maybe_unused]] Packed<X>& packed) {
#ifdef __CUDACC__
    uint4 bits = to_bits(packed);
    asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
    packed = from_bits<X>(bits);
#endif
}

// For load() and store(), addresses must be multiples of 16 bytes.
template <class X>
__device__ __forceinline__ Packed<X> load(const X* from LLMC_SITE) {
#ifdef __CUDACC__
    return from_bits<X>(*reinterpret_cast<const uint4*>(from));
#else
    return from_bits<X>(*simt::aligned(reinterpret_cast<const uint4*>(from), site));
#endif
}
// For data that is read once, which caches need not keep.
template <class X>
__device__ __forceinline__ Packed<X> load_streaming(const X* from LLMC_SITE) {
    return from_bits<X>(__ldcs(reinterpret_cast<const uint4*>(from) LLMC_PASS_SITE));
}
template <class X>
__device__ __forceinline__ void store(X* to, const Packed<X>& packed LLMC_SITE) {
#ifdef __CUDACC__
    *reinterpret_cast<uint4*>(to) = to_bits(packed);
#else
    *simt::aligned(reinterpret_cast<uint4*>(to), site) = to_bits(packed);
#endif
}
template <class X>
__device__ __forceinline__ void store_streaming(X* to, const Packed<X>& packed LLMC_SITE) {
    __stcs(reinterpret_cast<uint4*>(to), to_bits(packed) LLMC_PASS_SITE);
}

// Four elements, for kernels that read fp32 and write 16-bit elements or the other way round. A lane accesses 16 bytes
// of one and 8 bytes of the other, so that a warp's access is contiguous in both. (With 16 bytes of bf16 per
// lane, fp32 would take two accesses, each of which skips every other 16 bytes.)
template <class X>
struct alignas(4 * sizeof(X)) Quad {
    using Bits = std::conditional_t<sizeof(X) == 4, uint4, uint2>;
    X values[4];

    __device__ __forceinline__ X& operator[](int i) { return values[i]; }
    __device__ __forceinline__ const X& operator[](int i) const { return values[i]; }
};

// The address must be a multiple of 4 elements.
template <class X>
__device__ __forceinline__ Quad<X> load_quad(const X* from LLMC_SITE) {
    using Bits = typename Quad<X>::Bits;
#ifdef __CUDACC__
    const Bits bits = *reinterpret_cast<const Bits*>(from);
#else
    const Bits bits = *simt::aligned(reinterpret_cast<const Bits*>(from), site);
#endif
    Quad<X> quad;
    memcpy(&quad, &bits, sizeof bits);
    return quad;
}
template <class X>
__device__ __forceinline__ Quad<X> load_quad_streaming(const X* from LLMC_SITE) {
    using Bits = typename Quad<X>::Bits;
    const Bits bits = __ldcs(reinterpret_cast<const Bits*>(from) LLMC_PASS_SITE);
    Quad<X> quad;
    memcpy(&quad, &bits, sizeof bits);
    return quad;
}
template <class X>
__device__ __forceinline__ void store_quad(X* to, const Quad<X>& quad LLMC_SITE) {
    using Bits = typename Quad<X>::Bits;
    Bits bits;
    memcpy(&bits, &quad, sizeof bits);
#ifdef __CUDACC__
    *reinterpret_cast<Bits*>(to) = bits;
#else
    *simt::aligned(reinterpret_cast<Bits*>(to), site) = bits;
#endif
}
template <class X>
__device__ __forceinline__ void store_quad_streaming(X* to, const Quad<X>& quad LLMC_SITE) {
    using Bits = typename Quad<X>::Bits;
    Bits bits;
    memcpy(&bits, &quad, sizeof bits);
    __stcs(reinterpret_cast<Bits*>(to), bits LLMC_PASS_SITE);
}

}  // namespace llmc::cuda
