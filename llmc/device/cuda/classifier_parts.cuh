// The classifier of a rank that has some columns of the logits (ops.h: classifier_statistics, classifier_from_statistics).
// How these kernels came about: dev/classifier_statistics.cu, dev/classifier_from_statistics.cu. Whole rows in one
// kernel are classifier.cuh's, whose arithmetic this is: one rank with all columns has the same losses and gradients.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/classifier.cuh"

namespace llmc::cuda {

// The columns [first, first + count) of the vocabulary.
struct OwnColumns {
    std::int64_t first;
    int count;

    // Of a target, -1 where it is not here.
    __device__ __forceinline__ int of(std::int32_t target) const {
        const std::int64_t column = target - first;
        return column >= 0 && column < count ? static_cast<int>(column) : -1;
    }
};

// What ranks tell each other of a row.
struct RowStatistics {
    float maximum;  // of the logits; -infinity without any
    float sum;      // of exp(logit - maximum), relative to 2^scaled(maximum) to be exact
    float target_logit;

    __device__ static RowStatistics none() { return {-INFINITY, 0, 0}; }
};

// log2(e) x, rounded as the kernels that make a sum and those that use it must both do: what the product lost would
// be lost in each exponential (no fma may take it in).
__device__ __forceinline__ float scaled(float x) { return __fmul_rn(x, log2_e); }

// use(load(x + c), c) for the pieces of 16 bytes of this thread, c < end, of which four are under way before the first
// is used.
template <class X, class Use>
__device__ __forceinline__ void for_pieces(const X* x, int end, Use use) {
    constexpr int pack = Packed<X>::size, loads = 4;
    const int step = static_cast<int>(blockDim.x) * pack;
    for (int c = static_cast<int>(threadIdx.x) * pack; c < end; c += loads * step) {
        Packed<X> pieces[loads];
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            if (c + k * step < end) pieces[k] = load(x + c + k * step);
        }
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            if (c + k * step < end) use(pieces[k], c + k * step);
        }
    }
}

// A block does a row in one pass. (`turn`: the half of the partial sums whose readers are known to be done.)
template <class X>
__global__ void __launch_bounds__(1024)
    classifier_statistics_kernel3(RowStatistics* statistics, const X* logits, const std::int32_t* targets,
                                  std::int64_t rows, int columns, OwnColumns own) {
    SHARED(ExponentialSum, partials, [2 * warp_threads]);
    SHARED(float, greatest_of_warp, [2 * warp_threads]);
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / warp_threads, lane = thread % warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    int turn = 0;
    for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int target = targets[row];
        if (target == ignored_target) {
            if (thread == 0) statistics[row] = RowStatistics::none();
            continue;
        }
        const X* const x = logits + row * columns;
        ExponentialSum total = ExponentialSum::none();
        float greatest = -INFINITY;
        for_pieces(x, own.count, [&](const Packed<X>& piece, int c) {
            float widened[Packed<X>::size];
            widen(widened, piece, own.count - c);
            greatest = fmaxf(greatest, total.add(widened));
        });
        greatest = warp_maximum(greatest);
        if (lane == 0) greatest_of_warp[turn + warp] = greatest;
        total = block_sum(total, partials + turn);  // has the barrier
        if (warp == 0) {
            greatest = warp_maximum(lane < warps ? greatest_of_warp[turn + lane] : -INFINITY);
            const int column = own.of(target);
            if (lane == 0) {
                statistics[row] = {greatest, total.sum, column >= 0 ? to_float(x[column]) : 0};
            }
        }
        turn = warp_threads - turn;  // the other half
    }
}

// The statistics of a row over all columns, added in the order of the ranks.
//   statistics (ranks, rows)
__device__ __forceinline__ RowStatistics statistics_of_row(const RowStatistics* statistics, int ranks,
                                                           std::int64_t rows, std::int64_t row) {
    RowStatistics all = RowStatistics::none();
    for (int r = 0; r < ranks; ++r) all.maximum = fmaxf(all.maximum, statistics[r * rows + row].maximum);
    for (int r = 0; r < ranks; ++r) {
        const RowStatistics s = statistics[r * rows + row];
        all.sum += s.sum * exp2_approximate(scaled(s.maximum) - scaled(all.maximum));
        all.target_logit += s.target_logit;
    }
    return all;
}

// A block does a row: each thread adds up its statistics, and then writes its pieces; nobody waits for another.
template <class X>
__global__ void __launch_bounds__(1024)
    classifier_from_statistics_kernel3(X* logits, float* losses, const RowStatistics* statistics,
                                       const std::int32_t* targets, int ranks, std::int64_t rows, int columns,
                                       OwnColumns own, float scale, bool write_dlogits) {
    constexpr int pack = Packed<X>::size;
    const int end = blocks_for(own.count, pack) * pack;
    for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        X* const x = logits + row * columns;
        const int target = targets[row];
        const bool ignored = target == ignored_target;
        if (!ignored) {
            const RowStatistics all = statistics_of_row(statistics, ranks, rows, row);
            const ExponentialSum total{scaled(all.maximum), all.sum};
            if (threadIdx.x == 0) losses[row] = loss_of(total, all.target_logit);
            const float reciprocal = 1 / total.sum;
            // A target that is not here must not be found in the padding.
            const int column = own.of(target);
            for_pieces(x, write_dlogits ? end : 0, [&](const Packed<X>& piece, int c) {
                const int target_in_piece = column >= 0 ? column - c : -1;
                store_streaming(x + c,
                                gradient(piece, own.count - c, target_in_piece, total, reciprocal, scale));
            });
        } else if (threadIdx.x == 0) {
            losses[row] = 0;
        }
        const int first = (ignored ? 0 : end) + static_cast<int>(threadIdx.x) * pack;
        for (int c = first; write_dlogits && c < columns; c += static_cast<int>(blockDim.x) * pack) {
            store_streaming(x + c, Packed<X>{});
        }
    }
}

namespace detail {

// As many threads as a row has pieces, up to `block_threads`.
inline dim3 threads_of_row(int columns, int pack, int block_threads) {
    const int threads = blocks_for(blocks_for(columns, pack), warp_threads) * warp_threads;
    return dim3(static_cast<unsigned>(std::clamp(threads, warp_threads, block_threads)));
}

}  // namespace detail

// statistics fp32 (rows, 3); logits X (rows, columns), of which the first own.count count; targets int32 (rows), of the
// whole vocabulary or ignored_target
template <class X>
void classifier_statistics(const LaunchContext& on, float* statistics, const X* logits,
                           const std::int32_t* targets, std::int64_t rows, int columns, OwnColumns own,
                           int block_threads = 256) {
    constexpr int pack = Packed<X>::size;
    check(columns % pack == 0, "classifier: a row of logits is not a multiple of 16 bytes");
    check(own.count >= 0 && own.count <= columns, "classifier: the vocabulary is not inside the columns");
    const dim3 threads = detail::threads_of_row(own.count, pack, block_threads);
    launch(on, classifier_statistics_kernel3<X>,
           staying_blocks(on.chip, rows, static_cast<int>(threads.x), 0), threads, 0,
           reinterpret_cast<RowStatistics*>(statistics), logits, targets, rows, columns, own);
}

// logits X (rows, columns), of which the first own.count count; losses fp32, targets int32 (rows); statistics fp32
// (ranks, rows, 3)
template <class X>
void classifier_from_statistics(const LaunchContext& on, X* logits, float* losses, const float* statistics,
                                const std::int32_t* targets, int ranks, std::int64_t rows, int columns,
                                OwnColumns own, float scale, bool write_dlogits, int block_threads = 256) {
    constexpr int pack = Packed<X>::size;
    check(columns % pack == 0, "classifier: a row of logits is not a multiple of 16 bytes");
    check(own.count >= 0 && own.count <= columns, "classifier: the vocabulary is not inside the columns");
    const dim3 threads = detail::threads_of_row(write_dlogits ? columns : 0, pack, block_threads);
    launch(on, classifier_from_statistics_kernel3<X>,
           staying_blocks(on.chip, rows, static_cast<int>(threads.x), 0), threads, 0, logits, losses,
           reinterpret_cast<const RowStatistics*>(statistics), targets, ranks, rows, columns, own, scale,
           write_dlogits);
}

}  // namespace llmc::cuda
