// The squared ReLU, forward and backward (ops.h: relu_squared_forward, relu_squared_backward).
//
// Memory is the limit, as for the operations of elementwise.cuh: 16-byte accesses, several in flight, in a
// persistent grid. They take any number of elements at any address.
#pragma once

#include "llmc/device/cuda/elementwise.cuh"

namespace llmc::cuda {

// max(x, 0); NaN stays NaN.
__device__ __forceinline__ float positive_part(float x) { return x < 0 ? 0 : x; }

template <class X>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    relu_squared_forward_kernel3(X* out, const X* in, std::int64_t packs, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const auto of = [](float x) { return positive_part(x) * positive_part(x); };
    for_grid<4>(
        packs, [=](std::int64_t i) { return load_streaming(in + pack * i); },
        [=](std::int64_t i, const Packed<X>& x) {
            Packed<X> y;
#pragma unroll
            for (int e = 0; e < pack; ++e) y[e] = from_float<X>(of(to_float(x[e])));
            store(out + pack * i, y);
        });
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads()) {
        out[i] = from_float<X>(of(to_float(in[i])));
    }
}

// din may be dout: an element is read and written by one thread.
template <class X>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    relu_squared_backward_kernel3(X* din, const X* dout, const X* in, std::int64_t packs,
                                  std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    struct Operands {
        Packed<X> x, d;
    };
    const auto of = [](float x, float d) { return 2 * positive_part(x) * d; };
    for_grid<2>(
        packs,
        [=](std::int64_t i) {
            return Operands{load_streaming(in + pack * i), load_streaming(dout + pack * i)};
        },
        [=](std::int64_t i, const Operands& o) {
            Packed<X> y;
#pragma unroll
            for (int e = 0; e < pack; ++e) y[e] = from_float<X>(of(to_float(o.x[e]), to_float(o.d[e])));
            store(din + pack * i, y);
        });
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads()) {
        din[i] = from_float<X>(of(to_float(in[i]), to_float(dout[i])));
    }
}

// out, in X (elements)
template <class X>
void relu_squared_forward(const LaunchContext& on, X* out, const X* in, std::int64_t elements,
                          int block_threads = 256) {
    const std::int64_t packs = detail::whole_packs(elements, Packed<X>::size, out, in);
    launch(on, relu_squared_forward_kernel3<X>,
           detail::elementwise_blocks(on, packs, elements, block_threads), block_threads, 0, out, in, packs,
           elements);
}

// din, dout, in X (elements); din may be dout
template <class X>
void relu_squared_backward(const LaunchContext& on, X* din, const X* dout, const X* in, std::int64_t elements,
                           int block_threads = 256) {
    const std::int64_t packs = detail::whole_packs(elements, Packed<X>::size, din, dout, in);
    launch(on, relu_squared_backward_kernel3<X>,
           detail::elementwise_blocks(on, packs, elements, block_threads), block_threads, 0, din, dout, in,
           packs, elements);
}

}  // namespace llmc::cuda
