// CUDA's names for kernels that g++ or clang compiles (llmc/device/cuda/kernel.cuh): the built-in variables,
// barriers, warp collectives, cached loads and intrinsics. Each has its meaning on the CPU (CUDA C++
// Programming Guide, "C++ Language Extensions"). Names that no kernel uses yet are missing.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <concepts>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "simt/executor.h"

#undef __shared__  // as an attribute it would do nothing, without a message
#undef __constant__
#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#define __constant__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

inline dim3 gridDim, blockDim;
inline uint3 blockIdx, threadIdx;

namespace simt {

template <class... Parameters>
cudaError_t launch(const llmc::cuda::Chip& chip, cudaStream_t stream, void (*kernel)(Parameters...),
                   dim3 grid, dim3 block, DynamicShared shared,
                   std::type_identity_t<Parameters>... arguments) {
    struct Call {
        void (*kernel)(Parameters...);
        std::tuple<Parameters...> arguments;
    };
    const auto* const symbol = reinterpret_cast<const void*>(kernel);
    std::function<void()> run = [=, call = Call{kernel, {arguments...}}]() mutable {
        const auto run_thread = [](void* c) {
            std::apply(static_cast<Call*>(c)->kernel, static_cast<Call*>(c)->arguments);
        };
        run_grid(chip, {symbol, grid, block, shared, run_thread, &call});
    };
    if (options().queue) return options().queue(stream, symbol, std::move(run));
    run();
    return cudaSuccess;
}

template <class Declaration>
inline char key_of;  // its address is the key

// Declaration is the type of a lambda. Every declaration, and every instance of it in a template, has its own
// type.
template <class T, class Declaration>
T& shared_variable(Declaration) {
    constexpr std::size_t alignment = alignof(T) < 16 ? 16 : alignof(T);
    return *static_cast<T*>(static_shared(&key_of<Declaration>, sizeof(T), alignment));
}

template <class T>
T shuffle(std::uint32_t mask, T value, int from, const Site& site) {
    struct Argument {
        T value;
        int from;
        T result;
    } argument{value, from, value};
    meet_warp(
        mask,
        [](Lanes lanes, const Site& where) {
            for (int i = 0; i < 32; ++i) {
                auto* to = static_cast<Argument*>(lanes[i]);
                if (!to) continue;
                auto* source = static_cast<Argument*>(lanes[to->from]);
                if (!source) fail(where, "a shuffle reads a lane that takes no part in it");
                to->result = source->value;
            }
        },
        &argument, site);
    return argument.result;
}

inline std::uint32_t ballot(std::uint32_t mask, bool vote, const Site& site) {
    std::uint32_t argument = vote;
    meet_warp(
        mask,
        [](Lanes lanes, const Site&) {
            std::uint32_t votes = 0;
            for (int i = 0; i < 32; ++i) {
                if (lanes[i]) votes |= *static_cast<std::uint32_t*>(lanes[i]) << i;
            }
            for (int i = 0; i < 32; ++i) {
                if (lanes[i]) *static_cast<std::uint32_t*>(lanes[i]) = votes;
            }
        },
        &argument, site);
    return argument;
}

// The lanes of the mask that have the same value.
template <class T>
std::uint32_t match_any(std::uint32_t mask, T value, const Site& site) {
    struct Argument {
        T value;
        std::uint32_t peers;
    } argument{value, 0};
    meet_warp(
        mask,
        [](Lanes lanes, const Site&) {
            for (int i = 0; i < 32; ++i) {
                auto* to = static_cast<Argument*>(lanes[i]);
                for (int j = 0; to && j < 32; ++j) {
                    auto* other = static_cast<Argument*>(lanes[j]);
                    if (other && other->value == to->value) to->peers |= 1u << j;
                }
            }
        },
        &argument, site);
    return argument.peers;
}

template <class T>
T* aligned(T* pointer, const Site& site) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % sizeof(T) != 0) fail(site, "a misaligned access");
    return pointer;
}

}  // namespace simt

#define SIMT_SITE const simt::Site& site = std::source_location::current()
// For a call in a function that itself has a site.
#define SIMT_SITE_IN_CALLER simt::Site(std::source_location::current(), &site)

// ---- barriers and warp collectives ----

inline void __syncthreads(SIMT_SITE) { simt::meet_block(site); }
inline void __syncwarp(std::uint32_t mask = ~0u, SIMT_SITE) { simt::sync_warp(mask, site); }

template <class T>
T __shfl_sync(std::uint32_t mask, T value, int source, int width = 32, SIMT_SITE) {
    return simt::shuffle(mask, value, (simt::lane() & -width) | (source & (width - 1)), site);
}
template <class T>
T __shfl_xor_sync(std::uint32_t mask, T value, int bits, int width = 32, SIMT_SITE) {
    const int source = simt::lane() ^ bits;
    const bool later_segment = (source & -width) > (simt::lane() & -width);
    return simt::shuffle(mask, value, later_segment ? simt::lane() : source, site);
}
template <class T>
T __shfl_down_sync(std::uint32_t mask, T value, int delta, int width = 32, SIMT_SITE) {
    const bool inside = (simt::lane() & (width - 1)) + delta < width;
    return simt::shuffle(mask, value, simt::lane() + (inside ? delta : 0), site);
}
template <class T>
T __shfl_up_sync(std::uint32_t mask, T value, int delta, int width = 32, SIMT_SITE) {
    const bool inside = (simt::lane() & (width - 1)) >= delta;
    return simt::shuffle(mask, value, simt::lane() - (inside ? delta : 0), site);
}
inline std::uint32_t __ballot_sync(std::uint32_t mask, bool vote, SIMT_SITE) {
    return simt::ballot(mask, vote, site);
}
inline int __any_sync(std::uint32_t mask, bool vote, SIMT_SITE) {
    return simt::ballot(mask, vote, site) != 0;
}
inline int __all_sync(std::uint32_t mask, bool vote, SIMT_SITE) {
    return simt::ballot(mask, !vote, site) == 0;
}
template <std::integral T>
std::uint32_t __match_any_sync(std::uint32_t mask, T value, SIMT_SITE) {
    return simt::match_any(mask, value, site);
}

// ---- memory ----

template <class T>
T __ldg(const T* p, SIMT_SITE) {
    return *simt::aligned(p, site);
}
template <class T>
T __ldcs(const T* p, SIMT_SITE) {
    return *simt::aligned(p, site);
}
template <class T>
T __ldcg(const T* p, SIMT_SITE) {
    return *simt::aligned(p, site);
}
template <class T>
void __stcs(T* p, std::type_identity_t<T> value, SIMT_SITE) {
    *simt::aligned(p, site) = value;
}
template <class T>
void __stcg(T* p, std::type_identity_t<T> value, SIMT_SITE) {
    *simt::aligned(p, site) = value;
}

// Integers only, because floating-point atomics add in an order that changes from run to run. Relaxed, as on
// the GPU.
template <std::integral T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
template <std::integral T>
T atomicOr(T* p, std::type_identity_t<T> value) {
    return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);
}
template <std::integral T>
T atomicExch(T* p, std::type_identity_t<T> value) {
    return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);
}
template <std::integral T>
T atomicMax(T* p, std::type_identity_t<T> value) {
    T before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (before < value &&
           !__atomic_compare_exchange_n(p, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- arithmetic ----

// Byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes of a, then b.
inline std::uint32_t __byte_perm(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
    std::uint32_t chosen = 0;
    for (int i = 0; i < 4; ++i) {
        const auto byte = static_cast<std::uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff);
        chosen |= byte << (8 * i);
    }
    return chosen;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
// Never fused with an addition into one instruction, because the compiler sees a value in memory.
inline float __fmul_rn(float a, float b) {
    const volatile float product = a * b;
    return product;
}
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((std::uint64_t{a} * b) >> 32);
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
template <class A, class B>
auto min(A a, B b) -> std::common_type_t<A, B> {
    return b < a ? b : a;
}
template <class A, class B>
auto max(A a, B b) -> std::common_type_t<A, B> {
    return a < b ? b : a;
}
