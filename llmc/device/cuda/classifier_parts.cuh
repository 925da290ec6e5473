// The classifier of a rank that holds some columns of the logits (ops.h: classifier_statistics,
// classifier_from_statistics). The arithmetic is that of classifier.cuh, which does whole rows in one kernel.
// One rank with all columns thus has the same losses and gradients. dev/classifier.cu shows how that kernel
// became fast.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/classifier.cuh"

namespace llmc::cuda {

// The columns [first, first + count) of the vocabulary.
struct OwnColumns {
    std::int64_t first;
    int count;

    // The column of a target, or -1 if this rank does not hold it.
    __device__ __forceinline__ int of(std::int32_t target) const {
        const std::int64_t column = target - first;
        return column >= 0 && column < count ? static_cast<int>(column) : -1;
    }
};

// The statistics of a row that ranks exchange.
struct RowStatistics {
    float maximum;  // the greatest logit; -infinity if there are none
    float sum;      // sum of exp(logit) / 2^scaled(maximum), which is exp(logit - maximum) up to rounding
    float target_logit;

    __device__ static RowStatistics none() { return {-INFINITY, 0, 0}; }
};

// log2(e) x, rounded the same way where a sum is computed and where it is used. __fmul_rn prevents an fma.
// Otherwise the product's rounding error would be an error of each exponential.
__device__ __forceinline__ float scaled(float x) { return __fmul_rn(x, log2_e); }

// Calls use(load(x + c), c) for the thread's pieces of 16 bytes, c < end. Four loads are in flight before the
// first is used.
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

// A block computes a row in one pass. `turn` selects the half of the partial sums that no thread still reads.
template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_statistics_kernel3(RowStatistics* statistics, const X* logits, const std::int32_t* targets,
                                  std::int64_t rows, int columns, OwnColumns own, Cap cap) {
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
            widen(widened, piece, own.count - c, cap);
            greatest = fmaxf(greatest, total.add(widened));
        });
        greatest = warp_maximum(greatest);
        if (lane == 0) greatest_of_warp[turn + warp] = greatest;
        total = block_sum(total, partials + turn);  // has the barrier
        if (warp == 0) {
            greatest = warp_maximum(lane < warps ? greatest_of_warp[turn + lane] : -INFINITY);
            const int column = own.of(target);
            if (lane == 0) {
                statistics[row] = {greatest, total.sum, column >= 0 ? cap(to_float(x[column])).value : 0};
            }
        }
        turn = warp_threads - turn;  // the other half
    }
}

// Combines the statistics of a row over all columns, in the order of the ranks.
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

// A block computes a row. Each thread combines the row's statistics and then writes its pieces. There is no
// barrier.
template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_from_statistics_kernel3(X* logits, float* losses, const RowStatistics* statistics,
                                       const std::int32_t* targets, int ranks, std::int64_t rows, int columns,
                                       OwnColumns own, float scale, bool write_dlogits, Cap cap,
                                       float z_loss) {
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
            const float factor = factor_of(total, z_loss);
            // A target that is not here must not match a padding column.
            const int column = own.of(target);
            for_pieces(x, write_dlogits ? end : 0, [&](const Packed<X>& piece, int c) {
                const int target_in_piece = column >= 0 ? column - c : -1;
                store_streaming(x + c,
                                gradient(piece, own.count - c, target_in_piece, total, factor, scale, cap));
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

// As many threads as a row has pieces, in whole warps, up to `block_threads`.
inline dim3 threads_of_row(int columns, int pack, int block_threads) {
    const int threads = blocks_for(blocks_for(columns, pack), warp_threads) * warp_threads;
    return dim3(static_cast<unsigned>(std::clamp(threads, warp_threads, block_threads)));
}

}  // namespace detail

// statistics fp32 (rows, 3); logits X (rows, columns), of which the first own.count are used; targets int32
// (rows), each in the whole vocabulary or ignored_target
template <class X>
void classifier_statistics(const LaunchContext& on, float* statistics, const X* logits,
                           const std::int32_t* targets, std::int64_t rows, int columns, OwnColumns own,
                           const ClassifierTerms& terms = {}, int block_threads = 256) {
    constexpr int pack = Packed<X>::size;
    check(columns % pack == 0, "classifier: a row of logits is a multiple of 16 bytes");
    check(own.count >= 0 && own.count <= columns, "classifier: the vocabulary is inside the columns");
    const dim3 threads = detail::threads_of_row(own.count, pack, block_threads);
    detail::with_cap(terms.cap, [&]<class Cap>(Cap cap) {
        launch(on, classifier_statistics_kernel3<X, Cap>,
               persistent_blocks(on.chip, rows, static_cast<int>(threads.x), 0), threads, 0,
               reinterpret_cast<RowStatistics*>(statistics), logits, targets, rows, columns, own, cap);
    });
}

// logits X (rows, columns), of which the first own.count are used; losses fp32, targets int32 (rows);
// statistics fp32 (ranks, rows, 3)
template <class X>
void classifier_from_statistics(const LaunchContext& on, X* logits, float* losses, const float* statistics,
                                const std::int32_t* targets, int ranks, std::int64_t rows, int columns,
                                OwnColumns own, float scale, bool write_dlogits,
                                const ClassifierTerms& terms = {}, int block_threads = 256) {
    constexpr int pack = Packed<X>::size;
    check(columns % pack == 0, "classifier: a row of logits is a multiple of 16 bytes");
    check(own.count >= 0 && own.count <= columns, "classifier: the vocabulary is inside the columns");
    const dim3 threads = detail::threads_of_row(write_dlogits ? columns : 0, pack, block_threads);
    detail::with_cap(terms.cap, [&]<class Cap>(Cap cap) {
        launch(on, classifier_from_statistics_kernel3<X, Cap>,
               persistent_blocks(on.chip, rows, static_cast<int>(threads.x), 0), threads, 0, logits, losses,
               reinterpret_cast<const RowStatistics*>(statistics), targets, ranks, rows, columns, own, scale,
               write_dlogits, cap, terms.z_loss);
    });
}

}  // namespace llmc::cuda
