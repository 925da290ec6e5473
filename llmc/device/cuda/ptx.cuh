// Wrappers for instructions that CUDA C++ has no function for. Each contains the PTX and its meaning on the
// CPU, written from the PTX manual (ISA 9.0, "Warp Level Matrix Instructions" and "cp.async"). A conformance
// test compares the two on a GPU (test/kernels/ptx_test.cpp).
#pragma once

#include <type_traits>

#include "llmc/device/cuda/kernel.cuh"

#ifndef __CUDACC__
#include "simt/ptx_on_cpu.h"
#endif

namespace llmc::cuda {

#ifdef __CUDACC__
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
#endif

// A warp computes d += a b with a 16x16, b 16x8, d 16x8 in fp32. With lane = 4 g + t:
//   a[0..3]: rows g, g+8, g, g+8 of columns 2t, 2t+1 (a[0], a[1]) and 2t+8, 2t+9 (a[2], a[3])
//   b[0..1]: rows 2t, 2t+1 and 2t+8, 2t+9 of column g
//   d[0..3]: columns 2t, 2t+1 of row g, then of row g+8
// A register of a or b has two X, bf16 or fp16; the lower half is the lower column (or row of b).
template <class X>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[2] LLMC_SITE) {
    static_assert(std::is_same_v<X, bf16> || std::is_same_v<X, fp16>);
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, bf16>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#else
    simt::ptx::mma_m16n8k16<X>(d, a, b, site);
#endif
}

// A warp loads four 8x8 matrices of 16-bit elements from shared memory. Lane l gives the address of row l % 8 of matrix
// l / 8 (16 aligned bytes). With lane = 4 g + t, fragments[m] gets columns 2t, 2t+1 of row g of matrix m.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&fragments)[4], const void* row LLMC_SITE) {
#ifdef __CUDACC__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
    simt::ptx::ldmatrix_x4(fragments, row, false, site);
#endif
}

// The same for the transposed matrices: rows 2t, 2t+1 of column g.
__device__ __forceinline__ void ldmatrix_x4_transposed(std::uint32_t (&fragments)[4],
                                                       const void* row LLMC_SITE) {
#ifdef __CUDACC__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
    simt::ptx::ldmatrix_x4(fragments, row, true, site);
#endif
}

// Starts copying 16 aligned bytes from global to shared memory, bypassing the L1 cache. If not `valid`,
// writes zeros instead; `from` is then not read, but must be an address.
__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool valid LLMC_SITE) {
#ifdef __CUDACC__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#else
    simt::ptx::copy_async_16(to, from, valid, site);
#endif
}

// Closes this thread's current group of copies.
__device__ __forceinline__ void copy_async_commit() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    simt::commit_copies();
#endif
}

// Waits for all groups of this thread except the newest `groups_left`. Copies of other threads need a barrier
// too.
template <int groups_left>
__device__ __forceinline__ void copy_async_wait() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(groups_left) : "memory");
#else
    simt::ptx::finish_copies(groups_left);
#endif
}

// The hardware computes powers of two: e^x = 2^(x log2_e).
inline constexpr float log2_e = 1.44269504088896341f, ln_2 = 0.693147180559945309f;

// 2^x, within 2 ulp in the normal range (ex2.approx.ftz.f32).
__device__ __forceinline__ float exp2_approximate(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return std::exp2(x);
#endif
}

// 1/x, within 1 ulp; 0 if that is below the normal range (rcp.approx.ftz.f32).
__device__ __forceinline__ float reciprocal_approximate(float x) {
#ifdef __CUDACC__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1 / x;
#endif
}

// tanh, with a relative error of 2^-11 (tanh.approx.f32).
__device__ __forceinline__ float tanh_approximate(float x) {
#ifdef __CUDACC__
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return std::tanh(x);
#endif
}

// The thread's lane, the same as threadIdx.x % warp_threads, but read anew at each call. If registers are
// short, addresses derived from it are computed when they are used, by an instruction or two, and not all
// before a loop.
__device__ __forceinline__ int lane_id() {
#ifdef __CUDACC__
    unsigned lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return static_cast<int>(lane % warp_threads);  // so that the compiler knows its range
#else
    return static_cast<int>(threadIdx.x % warp_threads);
#endif
}

}  // namespace llmc::cuda
