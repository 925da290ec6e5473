// Casts, fills, addition of tensors, and the test for NaN and infinity (ops.h: cast, fill, add, accumulate,
// all_finite).
//
// All are limited by memory: 16-byte accesses, several in flight, in a persistent grid. They take any number
// of elements at any address. Elements outside whole 16-byte pieces are done one by one: the tail, or all if
// an address is not a multiple of 16.
#pragma once

#include <type_traits>

#include "llmc/device/cuda/grid.cuh"
#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/cuda/rounding.cuh"

namespace llmc::cuda {

// The most threads of a block, and how many blocks of this size a multiprocessor holds: three, with 40
// registers per thread. From sm_100 on the compiler needs more registers for the loads in flight, and would
// spill.
inline constexpr int elementwise_most_threads = 512;
constexpr int elementwise_resident(int architecture) { return architecture < 100 ? 3 : 2; }
#ifdef __CUDA_ARCH__
inline constexpr int elementwise_resident_here = elementwise_resident(__CUDA_ARCH__ / 10);
#else
inline constexpr int elementwise_resident_here = 1;  // not used on the host
#endif

template <class To, class From>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    cast_kernel3(To* out, const From* in, std::int64_t quads, std::int64_t elements) {
    for_grid<4>(
        quads, [=](std::int64_t i) { return load_quad_streaming(in + 4 * i); },
        [=](std::int64_t i, const Quad<From>& x) {
            Quad<To> y;
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] = from_float<To>(to_float(x[e]));
            store_quad(out + 4 * i, y);
        });
    for (std::int64_t i = 4 * quads + grid_thread(); i < elements; i += grid_threads()) {
        out[i] = from_float<To>(to_float(in[i]));
    }
}

template <class T>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    fill_kernel2(T* out, T value, std::int64_t packs, std::int64_t elements) {
    constexpr int pack = Packed<T>::size;
    Packed<T> values;
#pragma unroll
    for (int e = 0; e < pack; ++e) values[e] = value;
    for (std::int64_t i = grid_thread(); i < packs; i += grid_threads()) store(out + pack * i, values);
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads()) out[i] = value;
}

// out may be a or b: an element is read and written by one thread.
template <class X>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    add_kernel3(X* out, const X* a, const X* b, std::int64_t packs, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    struct Operands {
        Packed<X> a, b;
    };
    for_grid<2>(
        packs,
        [=](std::int64_t i) {
            return Operands{load_streaming(a + pack * i), load_streaming(b + pack * i)};
        },
        [=](std::int64_t i, const Operands& x) {
            Packed<X> sum;
#pragma unroll
            for (int e = 0; e < pack; ++e) sum[e] = from_float<X>(to_float(x.a[e]) + to_float(x.b[e]));
            store(out + pack * i, sum);
        });
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads()) {
        out[i] = from_float<X>(to_float(a[i]) + to_float(b[i]));
    }
}

// Random bits take more registers than the other kernels have, so fewer threads share a multiprocessor.
template <class In>
__global__ void __launch_bounds__(elementwise_most_threads, 2)
    accumulate_kernel4(bf16* out, const In* in, std::int64_t quads, std::int64_t elements,
                       StochasticRounding rounding, std::uint64_t count) {
    struct Operands {
        Quad<bf16> before;
        Quad<In> more;
    };
    for_grid<2>(
        quads,
        [=](std::int64_t i) {
            return Operands{load_quad_streaming(out + 4 * i), load_quad_streaming(in + 4 * i)};
        },
        [=](std::int64_t i, const Operands& x) {
            float sum[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] = to_float(x.before[e]) + to_float(x.more[e]);
            store_quad(out + 4 * i, rounded<bf16, true>(sum, rounding, count, 4 * i, Rounded::gradient));
        });
    for (std::int64_t i = 4 * quads + grid_thread(); i < elements; i += grid_threads()) {
        const RandomBits random = rounding_bits(rounding, count, i / 4 * 4, Rounded::gradient);
        std::uint32_t own = random[0];  // an index known only at run time would put them on the stack
#pragma unroll
        for (int e = 1; e < 4; ++e) own = i % 4 == e ? random[e] : own;
        out[i] = round_stochastically(to_float(out[i]) + to_float(in[i]), own);
    }
}

// True if one of the elements in these 32 bits is NaN or infinite: their exponent bits are all ones.
template <class X>
__device__ __forceinline__ bool has_nonfinite(std::uint32_t bits) {
    constexpr std::uint32_t low = std::is_same_v<X, fp16> ? 0x7c00u : 0x7f80u;
    constexpr std::uint32_t high = low << 16;
    return (bits & high) == high || (sizeof(X) == 2 && (bits & low) == low);
}

// Clears `flag`, which was 1, if there is a NaN or an infinity. All warps that write it write the same value.
template <class X>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    all_finite_kernel3(std::int32_t* flag, const X* x, std::int64_t packs, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    bool found = false;
    for_grid<4>(
        packs, [=](std::int64_t i) { return to_bits(load_streaming(x + pack * i)); },
        [&found](std::int64_t, const uint4& bits) {
            found |= has_nonfinite<X>(bits.x) | has_nonfinite<X>(bits.y) | has_nonfinite<X>(bits.z) |
                     has_nonfinite<X>(bits.w);
        });
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads()) {
        found |= has_nonfinite<float>(__float_as_uint(to_float(x[i])));
    }
    if (__any_sync(all_lanes, found) && threadIdx.x % warp_threads == 0) atomicExch(flag, 0);
}

namespace detail {

// The number of packs of `size` elements that can be read whole from all arrays.
template <class... T>
std::int64_t whole_packs(std::int64_t elements, int size, const T*... arrays) {
    const bool aligned = ((reinterpret_cast<std::uintptr_t>(arrays) % 16 == 0) && ...);
    return aligned ? elements / size : 0;
}

// A thread for each pack, or for each element if there are no packs.
inline unsigned elementwise_blocks(const LaunchContext& on, std::int64_t packs, std::int64_t elements,
                                   int block_threads) {
    check(block_threads <= elementwise_most_threads,
          "elementwise: a block has at most elementwise_most_threads");
    return streaming_blocks(on.chip, packs > 0 ? packs : elements, block_threads,
                            elementwise_most_threads * elementwise_resident(on.chip.architecture));
}

}  // namespace detail

template <class To, class From>
void cast(const LaunchContext& on, To* out, const From* in, std::int64_t elements, int block_threads = 256) {
    const std::int64_t quads = detail::whole_packs(elements, 4, out, in);
    launch(on, cast_kernel3<To, From>, detail::elementwise_blocks(on, quads, elements, block_threads),
           block_threads, 0, out, in, quads, elements);
}

template <class T>
void fill(const LaunchContext& on, T* out, T value, std::int64_t elements, int block_threads = 256) {
    const std::int64_t packs = detail::whole_packs(elements, Packed<T>::size, out);
    launch(on, fill_kernel2<T>, detail::elementwise_blocks(on, packs, elements, block_threads), block_threads,
           0, out, value, packs, elements);
}

template <class X>
void add(const LaunchContext& on, X* out, const X* a, const X* b, std::int64_t elements,
         int block_threads = 256) {
    const std::int64_t packs = detail::whole_packs(elements, Packed<X>::size, out, a, b);
    launch(on, add_kernel3<X>, detail::elementwise_blocks(on, packs, elements, block_threads), block_threads,
           0, out, a, b, packs, elements);
}

template <class In>
void accumulate(const LaunchContext& on, bf16* out, const In* in, std::int64_t elements,
                const StochasticRounding& rounding, std::int64_t count, int block_threads = 256) {
    const std::int64_t quads = detail::whole_packs(elements, 4, out, in);
    launch(on, accumulate_kernel4<In>, detail::elementwise_blocks(on, quads, elements, block_threads),
           block_threads, 0, out, in, quads, elements, rounding, static_cast<std::uint64_t>(count));
}

// flag = 1 if no element is NaN or infinite, else 0. Whole warps only.
template <class X>
void all_finite(const LaunchContext& on, std::int32_t* flag, const X* x, std::int64_t elements,
                int block_threads = 256) {
    check(block_threads % warp_threads == 0, "all_finite: a block is whole warps");
    fill(on, flag, std::int32_t{1}, 1, warp_threads);
    const std::int64_t packs = detail::whole_packs(elements, Packed<X>::size, x);
    launch(on, all_finite_kernel3<X>, detail::elementwise_blocks(on, packs, elements, block_threads),
           block_threads, 0, flag, x, packs, elements);
}

}  // namespace llmc::cuda
