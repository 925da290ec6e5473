// Softmax, cross-entropy and the gradient of the logits, in place (ops.h: fused_classifier). The development
// of this kernel is in dev/classifier.cu.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/grid.cuh"
#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/ptx.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/cuda/soft_cap.cuh"
#include "llmc/device/ops.h"

namespace llmc::cuda {

// sum_v exp(x_v) = 2^maximum sum, where maximum = max_v log2(e) x_v over the logits so far. No term exceeds
// 1.
struct ExponentialSum {
    float maximum;
    float sum;

    // The empty sum. Its maximum is finite, since the difference of two infinities is NaN, and far below any
    // usable logit. If a logit exceeds 1e9 in magnitude, the rounding error of log2(e) x exceeds the
    // range of a float's exponent. A row's loss may then be infinite or NaN.
    __device__ static ExponentialSum none() { return {-1e30f, 0}; }

    __device__ __forceinline__ void rescale(float new_maximum) {
        sum *= exp2_approximate(maximum - new_maximum);
        maximum = new_maximum;
    }
    // exp(x) / 2^maximum. The sum and the gradient have the same terms; the fma rounds the exponent once.
    __device__ __forceinline__ float term(float x) const {
        return exp2_approximate(fmaf(x, log2_e, -maximum));
    }
    // Adds the exponentials of x, and returns the greatest x.
    template <int n>
    __device__ __forceinline__ float add(const float (&x)[n]) {
        float greatest = x[0];
#pragma unroll
        for (int i = 1; i < n; ++i) greatest = fmaxf(greatest, x[i]);
        rescale(fmaxf(maximum, greatest * log2_e));
#pragma unroll
        for (int i = 0; i < n; ++i) sum += term(x[i]);
        return greatest;
    }
};

// ln sum_v exp(x_v)
__device__ __forceinline__ float lse_of(const ExponentialSum& total) {
    return fmaf(total.maximum, ln_2, logf(total.sum));
}
__device__ __forceinline__ float loss_of(const ExponentialSum& total, float target_logit) {
    return lse_of(total) - target_logit;
}

// The factor of a row's terms in the gradient: 1/sum, and with a z-loss also 1 + 2 z lse.
__device__ __forceinline__ float factor_of(const ExponentialSum& total, float z_loss) {
    const float reciprocal = 1 / total.sum;
    return z_loss == 0 ? reciprocal : reciprocal * fmaf(2 * z_loss, lse_of(total), 1.0f);
}

__device__ __forceinline__ ExponentialSum warp_sum(ExponentialSum x LLMC_SITE) {
    x.rescale(warp_maximum(x.maximum LLMC_PASS_SITE));
    x.sum = warp_sum(x.sum LLMC_PASS_SITE);
    return x;
}

// The sum over a block. It has one barrier: the next call must use other `partials` (one for each of up to 32
// warps).
__device__ __forceinline__ ExponentialSum block_sum(ExponentialSum mine, ExponentialSum* partials LLMC_SITE) {
    const unsigned warp = threadIdx.x / warp_threads, lane = threadIdx.x % warp_threads;
    mine = warp_sum(mine LLMC_PASS_SITE);
    if (lane == 0) partials[warp] = mine;
    __syncthreads(LLMC_PASS_ONLY_SITE);
    mine = lane < blockDim.x / warp_threads ? partials[lane] : ExponentialSum::none();
    return warp_sum(mine LLMC_PASS_SITE);
}

// Converts a piece of logits to fp32, and caps them. `left` is the number of columns of the vocabulary from
// the piece's first on. Columns beyond it become -infinity, whose exponential is 0.
template <class X, class Cap = NoCap>
__device__ __forceinline__ void widen(float (&x)[Packed<X>::size], const Packed<X>& piece, int left,
                                      const Cap& cap = {}) {
#pragma unroll
    for (int i = 0; i < Packed<X>::size; ++i) x[i] = cap(to_float(piece[i])).value;
    if (left < Packed<X>::size) {
#pragma unroll
        for (int i = 1; i < Packed<X>::size; ++i) {
            if (i >= left) x[i] = -INFINITY;
        }
    }
}

// The gradient (term factor - [v is the target]) scale of a piece, times the slope of a cap. `target` is the
// target's index in the piece; it may be outside.
template <class X, class Cap = NoCap>
__device__ __forceinline__ Packed<X> gradient(const Packed<X>& logits, int left, int target,
                                              const ExponentialSum& total, float factor, float scale,
                                              const Cap& cap = {}) {
    constexpr int pack = Packed<X>::size;
    float x[pack];
    [[maybe_unused]] float slope[pack];
    if constexpr (Cap::caps) {
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            const Capped y = cap(to_float(logits[i]));
            // Padding may hold any values: its slope may be NaN.
            x[i] = i < left ? y.value : -INFINITY;
            slope[i] = i < left ? y.slope : 0;
        }
    } else {
        widen(x, logits, left);
    }
#pragma unroll
    for (int i = 0; i < pack; ++i) x[i] = total.term(x[i]) * factor;
    if (target >= 0 && target < pack) {
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            if (i == target) x[i] -= 1;
        }
    }
#pragma unroll
    for (int i = 0; i < pack; ++i) {
        x[i] *= scale;
        if constexpr (Cap::caps) x[i] *= slope[i];
    }
    return packed_from<X>(x);
}

// A persistent grid: a block takes every gridDim.x-th row. The first `held` columns of a row are copied to
// shared memory, where they wait for the sum of exponentials, so that they are read once. The other columns
// are read twice. A thread always has the same pieces of 16 bytes. After writing one, it starts copying the
// next row's piece to its place without a barrier. The only barrier is that of the sum. Logits are capped
// each time they are read: what is kept has the size of X.
template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    fused_classifier_kernel5(X* logits, float* losses, const std::int32_t* targets, std::int64_t rows,
                             int columns, int vocabulary, int held, float scale, bool write_dlogits, Cap cap,
                             float z_loss) {
    constexpr int pack = Packed<X>::size;
    SharedAllocator shared;
    ExponentialSum* partials = shared.take<ExponentialSum>(2 * warp_threads);
    X* kept = shared.take<X>(static_cast<std::size_t>(held));
    const int first = static_cast<int>(threadIdx.x) * pack;
    const int step = static_cast<int>(blockDim.x) * pack;
    const int end = blocks_for(vocabulary, pack) * pack;
    // Copies are in two groups: the first half is used while the second is in flight.
    const int middle = min(held, blocks_for(held, 2 * step) * step);

    const auto is_read = [&](std::int64_t row) { return row < rows && targets[row] != ignored_target; };

    std::int64_t row = blockIdx.x;
    if (is_read(row)) {
        const auto copy = [&](int from, int to) {
            for (int c = from + first; c < to; c += step) {
                copy_async_16(kept + c, logits + row * columns + c, true);
            }
            copy_async_commit();
        };
        copy(0, middle);
        copy(middle, held);
    }

    int turn = 0;
    for (; row < rows; row += gridDim.x) {
        X* const x = logits + row * columns;
        const int target = targets[row];
        const bool ignored = target == ignored_target;
        ExponentialSum total = ExponentialSum::none();
        float factor = 0;
        if (ignored) {
            if (threadIdx.x == 0) losses[row] = 0;
        } else {
            // Read before the barrier, because the gradient overwrites this logit after the barrier.
            const float target_logit = threadIdx.x == 0 ? cap(to_float(x[target])).value : 0;
            const auto add = [&](const Packed<X>& piece, int c) {
                float widened[pack];
                widen(widened, piece, vocabulary - c, cap);
                total.add(widened);
            };
            copy_async_wait<1>();
            for (int c = first; c < middle; c += step) add(load(kept + c), c);
            copy_async_wait<0>();
            for (int c = middle + first; c < held; c += step) add(load(kept + c), c);
#pragma unroll 4
            for (int c = held + first; c < end; c += step) add(load(x + c), c);

            total = block_sum(total, partials + turn);
            turn = warp_threads - turn;  // the other half
            factor = factor_of(total, z_loss);
            if (threadIdx.x == 0) losses[row] = loss_of(total, target_logit);
        }

        // Starts with the columns that the caches may still hold.
        const auto dlogits = [&](const Packed<X>& piece, int c) {
            return gradient(piece, vocabulary - c, target - c, total, factor, scale, cap);
        };
        if (write_dlogits) {
            if (!ignored) {
                for (int c = held + first; c < end; c += step) {
                    store_streaming(x + c, dlogits(load_streaming(x + c), c));
                }
            }
            for (int c = (ignored ? 0 : end) + first; c < columns; c += step)
                store_streaming(x + c, Packed<X>{});
        }
        const bool writes = write_dlogits && !ignored;
        const bool copies = is_read(row + gridDim.x);
        const X* const next = x + static_cast<std::int64_t>(gridDim.x) * columns;
        const auto write_and_copy = [&](int from, int to) {
            for (int c = from + first; c < to; c += step) {
                if (writes) store_streaming(x + c, dlogits(load(kept + c), c));
                if (copies) copy_async_16(kept + c, next + c, true);
            }
            copy_async_commit();
        };
        if (writes || copies) {
            write_and_copy(0, middle);
            write_and_copy(middle, held);
        }
    }
}

namespace detail {

// Calls f(cap) with the type of the cap.
template <class F>
void with_cap(float cap, const F& f) {
    if (cap == 0) return f(NoCap{});
    f(SoftCap(cap));
}

}  // namespace detail

// logits X (rows, columns), of which the first `vocabulary` columns count; losses fp32 (rows); targets int32
// (rows), each in the vocabulary or ignored_target. A row is read once if it fits a block's shared memory.
// 50304 bf16 fit on every chip from sm_80 on.
template <class X>
void fused_classifier(const LaunchContext& on, X* logits, float* losses, const std::int32_t* targets,
                      std::int64_t rows, int columns, int vocabulary, float scale, bool write_dlogits,
                      const ClassifierTerms& terms = {}, int block_threads = 512) {
    constexpr int pack = Packed<X>::size;
    check(columns % pack == 0, "classifier: a row of logits is a multiple of 16 bytes");
    check(vocabulary > 0 && vocabulary <= columns, "classifier: the vocabulary is inside the columns");
    if (rows == 0) return;
    constexpr std::size_t partial_bytes = SharedAllocator::bytes<ExponentialSum>(2 * warp_threads);
    const std::size_t room = (on.chip.shared_bytes_per_block - partial_bytes) / 128 * 128 / sizeof(X);
    const int pieces = blocks_for(vocabulary, pack);
    const int held = std::min(pieces * pack, static_cast<int>(room));
    const std::size_t shared_bytes =
        partial_bytes + SharedAllocator::bytes<X>(static_cast<std::size_t>(held));
    const int threads = std::min(block_threads, blocks_for(pieces, warp_threads) * warp_threads);
    detail::with_cap(terms.cap, [&]<class Cap>(Cap cap) {
        launch(on, fused_classifier_kernel5<X, Cap>, persistent_blocks(on.chip, rows, threads, shared_bytes),
               threads, shared_bytes, logits, losses, targets, rows, columns, vocabulary, held, scale,
               write_dlogits, cap, terms.z_loss);
    });
}

}  // namespace llmc::cuda
