// Kernels with one fault each, and the same kernels without it: faulty = false. A sound kernel with 64
// threads a block writes
//   out[i] = in[i] + in[63 - i]
#pragma once

#include "llmc/device/cuda/ptx.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace planted_faults {

using llmc::cuda::all_lanes;
using llmc::cuda::SharedAllocator;

constexpr int threads = 64;
constexpr std::size_t shared_bytes = 2 * threads * sizeof(float);

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }

// Right only in the order of the numbers: in a group, each thread adds the value that the thread `distance`
// before it has written.
__global__ inline void add_before(float* out, const float* in, int group, int distance) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    out[i] = in[i] + (i % group < distance ? 0 : out[i - distance]);
}

// ---- barriers and collectives that some threads miss ----

template <bool faulty>
__global__ void barrier_in_branch(float* out, const float* in) {
    const int i = thread();
    if (!faulty || i < 32) __syncthreads();
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void two_barriers(float* out, const float* in) {
    const int i = thread();
    if (faulty && i < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[i] = in[i] + in[threads - 1 - i];
}

// Barriers in a function are distinguished by the caller.
template <bool faulty>
__global__ void two_sums_of_a_block(float* out, const float* in) {
    const int i = thread();
    float sum;
    if (faulty && i < 32) {
        sum = llmc::cuda::block_sum(in[i]);
    } else {
        sum = llmc::cuda::block_sum(in[i]);
    }
    out[i] = in[i] + in[threads - 1 - i] + 0 * sum;
}

__device__ inline void wait_twice(bool skip_first LLMC_SITE) {
    if (!skip_first) __syncthreads(LLMC_PASS_ONLY_SITE);
    __syncthreads(LLMC_PASS_ONLY_SITE);
}

// They are also distinguished by their own line: a function's first barrier is not its second.
template <bool faulty>
__global__ void two_barriers_of_a_function(float* out, const float* in) {
    const int i = thread();
    wait_twice(faulty && i < 32);
    if (faulty && i < 32) __syncthreads();
    out[i] = in[i] + in[threads - 1 - i];
}

// All calls in between count too: the second sum of the block is not the third.
template <bool faulty>
__global__ void two_reductions_of_a_function(float* out, const float* in) {
    const int i = thread();
    const auto sums = [&](bool skip_first LLMC_SITE) {
        float sum = 0;
        if (!skip_first) sum += llmc::cuda::block_sum(in[i] LLMC_PASS_SITE);
        return sum + llmc::cuda::block_sum(in[i] LLMC_PASS_SITE);
    };
    float sum = sums(faulty && i < 32);
    if (faulty && i < 32) sum += llmc::cuda::block_sum(in[i]);
    out[i] = in[i] + in[threads - 1 - i] + 0 * sum;
}

template <bool faulty>
__global__ void lambda_in_two_branches(float* out, const float* in) {
    const int i = thread();
    const auto wait = [](LLMC_ONLY_SITE) { __syncthreads(LLMC_PASS_ONLY_SITE); };
    if (faulty && i < 32) {
        wait();
    } else {
        wait();
    }
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void return_before_barrier(float* out, const float* in) {
    const int i = thread();
    out[i] = in[i] + in[threads - 1 - i];
    if (faulty && i == 5) return;
    __syncthreads();
}

template <bool faulty>
__global__ void mask_wider_than_branch(float* out, const float* in) {
    const int i = thread();
    if (i % 32 < 16) out[i] = in[i] + __shfl_xor_sync(faulty ? all_lanes : 0xffffu, in[i], 0);
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void return_before_collective(float* out, const float* in) {
    const int i = thread();
    out[i] = in[i] + in[threads - 1 - i];
    if (faulty && i == 3) return;
    __syncwarp();
}

template <bool faulty>
__global__ void two_collectives(float* out, const float* in) {
    const int i = thread();
    if (faulty && i % 2 == 0) {
        __syncwarp();
    } else {
        __syncwarp();
    }
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void two_maxima_of_a_warp(float* out, const float* in) {
    const int i = thread();
    float greatest;
    if (faulty && i % 2 == 0) {
        greatest = llmc::cuda::warp_maximum(in[i]);
    } else {
        greatest = llmc::cuda::warp_maximum(in[i]);
    }
    out[i] = in[i] + in[threads - 1 - i] + 0 * greatest;
}

template <bool faulty>
__global__ void shuffle_from_outside(float* out, const float* in) {
    const int i = thread();
    if (i % 32 < 16) out[i] = __shfl_sync(0xffffu, in[i], faulty ? 20 : 2);
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void mask_without_own_lane(float* out, const float* in) {
    const int i = thread();
    __syncwarp(faulty ? all_lanes ^ 1u << i % 32 : all_lanes);
    out[i] = in[i] + in[threads - 1 - i];
}

// Half of each warp waits at the barrier, half at the shuffle. Neither is ever complete.
template <bool faulty>
__global__ void block_waits_for_itself(float* out, const float* in) {
    const int i = thread();
    float x = in[i];
    if (!faulty || i % 2 == 0) x = __shfl_xor_sync(all_lanes, x, 0);
    __syncthreads();
    out[i] = x + in[threads - 1 - i];
}

// ---- missing synchronisation ----

template <bool faulty>
__global__ void missing_barrier(float* out, const float* in) {
    SHARED(float, values, [threads]);
    const int i = thread();
    values[i] = in[i];
    if (!faulty) __syncthreads();
    out[i] = in[i] + values[threads - 1 - i];
}

// The barrier before an array is reused is forgotten most often.
template <bool faulty>
__global__ void missing_second_barrier(float* out, const float* in) {
    SHARED(float, values, [threads]);
    const int i = thread();
    values[i] = in[i];
    __syncthreads();
    const float sum = in[i] + values[threads - 1 - i];
    if (!faulty) __syncthreads();
    values[i] = sum;
    __syncthreads();
    out[i] = values[i];
}

template <bool faulty>
__global__ void missing_warp_barrier(float* out, const float* in) {
    SHARED(float, values, [threads]);
    const int i = thread(), mirrored = i ^ 31;  // in the same warp
    values[i] = in[i];
    if (!faulty) __syncwarp();
    out[i] = values[mirrored] == in[mirrored] ? in[i] + in[threads - 1 - i] : 0;
}

// Lanes wait for each other in a shuffle, which orders none of their accesses to memory.
template <bool faulty>
__global__ void shuffle_for_a_warp_barrier(float* out, const float* in) {
    SHARED(float, values, [threads]);
    const int i = thread(), mirrored = i ^ 31;
    values[i] = in[i];
    const float own = __shfl_sync(all_lanes, in[i], i % 32);
    if (!faulty) __syncwarp();
    out[i] = values[mirrored] == in[mirrored] ? own + in[threads - 1 - i] : 0;
}

template <bool faulty>
__global__ void missing_copy_wait(float* out, const float* in) {
    SHARED(float4, values, [threads / 4]);
    const int i = thread();
    if (i < threads / 4) llmc::cuda::copy_async_16(&values[i], in + 4 * i, true);
    llmc::cuda::copy_async_commit();
    llmc::cuda::copy_async_wait<faulty ? 1 : 0>();
    __syncthreads();
    out[i] = in[i] + reinterpret_cast<const float*>(values)[threads - 1 - i];
    llmc::cuda::copy_async_wait<0>();
}

// The target already holds the same values, so only the copy itself can show that no thread waited for it.
template <bool faulty>
__global__ void copy_of_the_same_values(float* out, const float* in) {
    SHARED(float4, values, [threads / 4]);
    float* const floats = reinterpret_cast<float*>(values);
    const int i = thread();
    floats[i] = in[i];
    __syncthreads();
    if (i < threads / 4) llmc::cuda::copy_async_16(&values[i], in + 4 * i, true);
    llmc::cuda::copy_async_commit();
    llmc::cuda::copy_async_wait<faulty ? 1 : 0>();
    __syncthreads();
    out[i] = in[i] + floats[threads - 1 - i];
    llmc::cuda::copy_async_wait<0>();
}

// The source is written before the copy, without a barrier between the two. The only barrier is before the
// wait.
template <bool faulty>
__global__ void copy_before_barrier(float* out, const float* in) {
    SHARED(float4, values, [threads / 4]);
    const int i = thread();
    out[i] = in[i];
    if (!faulty) __syncthreads();
    if (i < threads / 4) llmc::cuda::copy_async_16(&values[i], out + 4 * i, true);
    llmc::cuda::copy_async_commit();
    __syncthreads();
    llmc::cuda::copy_async_wait<0>();
    __syncthreads();
    out[i] = in[i] + reinterpret_cast<const float*>(values)[threads - 1 - i];
}

// The source is written while it is copied.
template <bool faulty>
__global__ void barrier_before_copy_wait(float* out, const float* in) {
    SHARED(float4, values, [threads / 4]);
    const int i = thread();
    out[i] = in[i];
    __syncthreads();
    if (i < threads / 4) llmc::cuda::copy_async_16(&values[i], out + 4 * i, true);
    llmc::cuda::copy_async_commit();
    if (!faulty) llmc::cuda::copy_async_wait<0>();
    __syncthreads();
    out[i] = in[i];
    llmc::cuda::copy_async_wait<0>();
    __syncthreads();
    out[i] = in[i] + reinterpret_cast<const float*>(values)[threads - 1 - i];
}

template <bool faulty>
__global__ void copy_never_waited_for(float* out, const float* in) {
    SHARED(float4, values, [threads / 4]);
    const int i = thread();
    if (i < threads / 4) llmc::cuda::copy_async_16(&values[i], in + 4 * i, true);
    if (!faulty) llmc::cuda::copy_async_commit();
    llmc::cuda::copy_async_wait<0>();
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void unwritten_shared_memory(float* out, const float* in) {
    SHARED(float, values, [threads]);
    const int i = thread();
    if (!faulty || i > 0) values[i] = in[i];
    __syncthreads();
    out[i] = in[i] + values[threads - 1 - i];
}

template <bool faulty>
__global__ void adds_of_a_block(float* out, const float* in) {
    SHARED(int, count, [1]);
    const int i = thread();
    if (i == 0) count[0] = 0;
    __syncthreads();
    if (faulty) {
        count[0] += 1;
    } else {
        atomicAdd(&count[0], 1);
    }
    __syncthreads();
    out[i] = in[i] + in[threads - 1 - i] + static_cast<float>(count[0] - threads);
}

// out[threads] is written by all blocks, the other elements by the first block.
template <bool faulty>
__global__ void adds_of_blocks(float* out, const float* in) {
    const int i = thread();
    if (blockIdx.x == 0) out[i] = in[i] + in[threads - 1 - i];
    if (i != 0) return;
    int* const count = reinterpret_cast<int*>(out + threads);
    if (faulty) {
        *count += 1;
    } else {
        atomicAdd(count, 1);
    }
}

// ---- memory ----

template <bool faulty>
__global__ void past_shared_variable(float* out, const float* in) {
    SHARED(float, values, [threads]);
    const int i = thread();
    values[i] = in[i];
    __syncthreads();
    const float* const first = &values[0];
    out[i] = in[i] + in[threads - 1 - i] + 0 * first[i + faulty];
}

template <bool faulty>
__global__ void past_dynamic_array(float* out, const float* in) {
    SharedAllocator shared;
    float *const first = shared.take<float>(threads), *const second = shared.take<float>(threads);
    const int i = thread();
    first[i] = second[i] = in[i];
    __syncthreads();
    out[i] = in[i] + in[threads - 1 - i] + 0 * first[i + faulty];
}

template <bool faulty>
__global__ void past_global_array(float* out, const float* in) {
    const int i = thread();
    out[i] = in[i] + in[threads - 1 - i] + 0 * in[i + faulty];
}

template <bool faulty>
__global__ void write_past_global_array(float* out, const float* in) {
    const int i = thread();
    out[i] = in[i] + in[threads - 1 - i];
    if (i == threads - 1) out[i + 1 + faulty] = 0;
}

// Found although no thread waits for the copy.
template <bool faulty>
__global__ void copy_past_global_array(float* out, const float* in) {
    SHARED(float4, values, [threads]);
    const int i = thread();
    out[i] = in[i] + in[threads - 1 - i];
    llmc::cuda::copy_async_16(&values[i], in + (faulty ? threads + 4 * i : i / 4 * 4), true);
    llmc::cuda::copy_async_commit();
    if (!faulty) llmc::cuda::copy_async_wait<0>();
}

template <bool faulty>
__global__ void misaligned_load(float* out, const float* in) {
    const int i = thread();
    const auto* const four = reinterpret_cast<const float4*>(in + faulty);
    out[i] = in[i] + in[threads - 1 - i] + 0 * (*four).x;
}

template <bool faulty>
__global__ void misaligned_streaming_load(float* out, const float* in) {
    const int i = thread();
    out[i] = in[i] + in[threads - 1 - i] + 0 * __ldcs(reinterpret_cast<const float4*>(in + faulty)).x;
}

template <bool faulty>
__global__ void ldmatrix_of_global_memory(float* out, const float* in) {
    SHARED(float4, values, [threads / 4]);
    const int i = thread();
    reinterpret_cast<float*>(values)[i] = in[i];
    __syncthreads();
    std::uint32_t fragments[4];
    llmc::cuda::ldmatrix_x4(fragments, faulty ? static_cast<const void*>(in) : &values[i % 8]);
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void asynchronous_copy_to_global_memory(float* out, const float* in) {
    SHARED(float4, values, [threads / 4]);
    const int i = thread();
    if (i < threads / 4) {
        llmc::cuda::copy_async_16(faulty ? static_cast<void*>(out) : &values[i], in + 4 * i, true);
    }
    llmc::cuda::copy_async_commit();
    llmc::cuda::copy_async_wait<0>();
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void too_large_shared_variable(float* out, const float* in) {
    SHARED(float, values, [faulty ? llmc::cuda::Chip::default_shared_bytes / sizeof(float) + 1 : threads]);
    const int i = thread();
    values[i] = in[i];
    __syncthreads();
    out[i] = in[i] + values[threads - 1 - i];
}

// Together with the bytes of the launch, more than a block has without asking.
template <bool faulty>
__global__ void all_shared_memory_for_variables(float* out, const float* in) {
    SHARED(float, values, [faulty ? llmc::cuda::Chip::default_shared_bytes / sizeof(float) : threads]);
    const int i = thread();
    values[i] = in[i];
    __syncthreads();
    out[i] = in[i] + values[threads - 1 - i];
}

template <bool faulty>
__global__ void divided_differently(float* out, const float* in) {
    SharedAllocator shared;
    const int i = thread();
    shared.take<float>(static_cast<std::size_t>(faulty && i % 2 == 0 ? 8 : 16));
    out[i] = in[i] + in[threads - 1 - i];
}

template <bool faulty>
__global__ void takes_more_than_launched(float* out, const float* in) {
    SharedAllocator shared;
    shared.take<float>(faulty ? 3 * threads : threads);
    const int i = thread();
    out[i] = in[i] + in[threads - 1 - i];
}

}  // namespace planted_faults
