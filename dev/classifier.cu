// The classifier, in five variants (llmc/device/ops.h). For each of N rows of V logits: the softmax, the loss
// -ln softmax[target], and the gradient (softmax - [target]) scale, which replaces the logits.
//
// Two exponentials per element are about 10 instructions, half of what the memory time allows. So memory is
// the limit: 2 N V elements (read, write). The difficulty is that the gradient needs the sum over the row,
// and a row is long: 50304 bf16 are 101 KB. The variants differ in how often they read it:
//   1  A block does a row in three passes: its maximum, the sum of exponentials, the gradient. That is three
//      reads. The later two come from cache if it still has the row; with a hundred active rows and 40 MB of
//      L2, it often does not.
//   2  16-byte loads: an eighth of the load instructions, more bytes in flight.
//   3  The maximum and the sum in one pass (Milakov & Gimelshein 2018): when the maximum grows, the sum so
//      far is scaled down. Two reads. exp is exp2 with log2(e) in an fma: one instruction and one of the
//      special-function unit.
//   4  The row is kept in shared memory: one read. But a multiprocessor with room for one or two rows loads,
//      sums and writes in turn, and memory is idle meanwhile.
//   5  A persistent grid. While a row's gradient is written, the next row is copied into its place
//      (cp.async), piece by piece, by the thread that owns the piece. Reading, computing and writing overlap,
//      with one barrier per row. Data that does not fit is read twice (llmc/device/cuda/classifier.cuh).
// Shapes with a cap also have a z-loss. There, y = cap tanh(x/cap) takes the place of a logit x. The same
// bytes move. Each logit is capped twice, since y in fp32 has no room beside it: an ex2 and a rcp each time,
// so six results of the special-function units per element. An H100 makes 3.6e12 of them a second, and moves
// 7.5e11 elements in bf16: both limits are near. The z-loss is a factor of the row.
#include "llmc/device/cuda/classifier.cuh"

#include "dev/lab/lab.h"

namespace lab::classifier_variants {

using namespace llmc::cuda;
using llmc::ignored_target;

template <class X>
struct Row {
    X* logits;
    float* loss;
    int target, columns, vocabulary;
    float scale;
};

// The row of this block. If it is ignored, it is finished here, and the result has no logits.
template <class X>
__device__ __forceinline__ Row<X> row_of_block(X* logits, float* losses, const std::int32_t* targets,
                                               int columns, int vocabulary, float scale) {
    const std::int64_t row = blockIdx.x;
    X* const x = logits + row * columns;
    if (targets[row] != ignored_target) {
        return {x, losses + row, targets[row], columns, vocabulary, scale};
    }
    for (int v = static_cast<int>(threadIdx.x); v < columns; v += static_cast<int>(blockDim.x)) {
        x[v] = from_float<X>(0);
    }
    if (threadIdx.x == 0) losses[row] = 0;
    return {};
}

template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_kernel1(X* logits, float* losses, const std::int32_t* targets, int columns, int vocabulary,
                       float scale, Cap cap, float z_loss) {
    const Row<X> row = row_of_block(logits, losses, targets, columns, vocabulary, scale);
    X* const x = row.logits;
    if (!x) return;
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    const float target_logit = cap(to_float(x[row.target])).value;

    float maximum = -INFINITY;
    for (int v = first; v < vocabulary; v += step) maximum = fmaxf(maximum, cap(to_float(x[v])).value);
    maximum = block_maximum(maximum);
    float sum = 0;
    for (int v = first; v < vocabulary; v += step) sum += expf(cap(to_float(x[v])).value - maximum);
    sum = block_sum(sum);
    if (first == 0) *row.loss = logf(sum) - (target_logit - maximum);
    const float factor = (1 + 2 * z_loss * (logf(sum) + maximum)) / sum;
    for (int v = first; v < columns; v += step) {
        const Capped y = cap(v < vocabulary ? to_float(x[v]) : 0);
        const float p = v < vocabulary ? expf(y.value - maximum) * factor : 0;
        x[v] = from_float<X>((p - (v == row.target ? 1.0f : 0.0f)) * scale * y.slope);
    }
}

// Calls f(piece, column) for this thread's pieces of 16 bytes that begin before column `end`.
template <class X, class F>
__device__ __forceinline__ void for_pieces(const X* x, int end, F f) {
    constexpr int pack = Packed<X>::size;
    for (int c = static_cast<int>(threadIdx.x) * pack; c < end; c += static_cast<int>(blockDim.x) * pack) {
        f(load(x + c), c);
    }
}

// The last pass of variants 2 to 4. It reads from `from`, which may be shared memory.
template <class X, class Cap>
__device__ __forceinline__ void write_gradient(const Row<X>& row, const X* from, const ExponentialSum& total,
                                               const Cap& cap, float z_loss) {
    const float factor = factor_of(total, z_loss);
    for_pieces(from, row.vocabulary, [&](const Packed<X>& piece, int c) {
        store_streaming(row.logits + c,
                        gradient(piece, row.vocabulary - c, row.target - c, total, factor, row.scale, cap));
    });
    constexpr int pack = Packed<X>::size;
    const int end = blocks_for(row.vocabulary, pack) * pack;
    for_pieces(row.logits + end, row.columns - end,
               [&](const Packed<X>&, int c) { store_streaming(row.logits + end + c, Packed<X>{}); });
}

template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_kernel2(X* logits, float* losses, const std::int32_t* targets, int columns, int vocabulary,
                       float scale, Cap cap, float z_loss) {
    const Row<X> row = row_of_block(logits, losses, targets, columns, vocabulary, scale);
    X* const x = row.logits;
    if (!x) return;
    const float target_logit = cap(to_float(x[row.target])).value;
    float widened[Packed<X>::size];

    float greatest = -INFINITY;
    for_pieces(x, vocabulary, [&](const Packed<X>& piece, int c) {
        widen(widened, piece, vocabulary - c, cap);
        for (const float l : widened) greatest = fmaxf(greatest, l);
    });
    ExponentialSum total{block_maximum(greatest) * log2_e, 0};
    for_pieces(x, vocabulary, [&](const Packed<X>& piece, int c) {
        widen(widened, piece, vocabulary - c, cap);
        for (const float l : widened) total.sum += total.term(l);
    });
    total.sum = llmc::cuda::block_sum(total.sum);
    if (threadIdx.x == 0) *row.loss = loss_of(total, target_logit);
    write_gradient<X>(row, x, total, cap, z_loss);
}

template <class X, class Cap>
__device__ __forceinline__ void add(ExponentialSum& total, const Packed<X>& piece, int left, const Cap& cap) {
    float widened[Packed<X>::size];
    widen(widened, piece, left, cap);
    total.add(widened);
}

template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_kernel3(X* logits, float* losses, const std::int32_t* targets, int columns, int vocabulary,
                       float scale, Cap cap, float z_loss) {
    SHARED(ExponentialSum, partials, [warp_threads]);
    const Row<X> row = row_of_block(logits, losses, targets, columns, vocabulary, scale);
    X* const x = row.logits;
    if (!x) return;
    const float target_logit = cap(to_float(x[row.target])).value;
    ExponentialSum total = ExponentialSum::none();
    for_pieces(x, vocabulary, [&](const Packed<X>& piece, int c) { add(total, piece, vocabulary - c, cap); });
    total = block_sum(total, partials);
    if (threadIdx.x == 0) *row.loss = loss_of(total, target_logit);
    write_gradient<X>(row, x, total, cap, z_loss);
}

template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_kernel4(X* logits, float* losses, const std::int32_t* targets, int columns, int vocabulary,
                       float scale, Cap cap, float z_loss) {
    SHARED(ExponentialSum, partials, [warp_threads]);
    SharedAllocator shared;
    X* const kept = shared.take<X>(static_cast<std::size_t>(columns));
    const Row<X> row = row_of_block(logits, losses, targets, columns, vocabulary, scale);
    X* const x = row.logits;
    if (!x) return;
    const float target_logit = cap(to_float(x[row.target])).value;
    ExponentialSum total = ExponentialSum::none();
    for_pieces(x, vocabulary, [&](const Packed<X>& piece, int c) {
        store(kept + c, piece);
        add(total, piece, vocabulary - c, cap);
    });
    total = block_sum(total, partials);
    if (threadIdx.x == 0) *row.loss = loss_of(total, target_logit);
    write_gradient<X>(row, kept, total, cap, z_loss);
}

template <class X>
class Classifier : public Problem {
  public:
    Classifier(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          vocabulary_(static_cast<int>(shape[1])),
          columns_(blocks_for(vocabulary_, 128) * 128),
          terms_{static_cast<float>(shape[2]), shape[2] > 0 ? 0x1p-7f : 0.0f},
          logits_(rows_ * columns_),
          result_(rows_ * columns_),
          losses_(rows_),
          targets_(rows_) {
        draw.normal(logits_, 2);
        draw.below(targets_, vocabulary_);
        targets_[rows_ / 2] = ignored_target;
        // Padding is not part of the softmax, whatever its values are.
        for (std::int64_t i = vocabulary_; i < rows_ * columns_; i += columns_)
            logits_[i] = from_float<X>(50);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        llmc::cuda::detail::with_cap(terms_.cap, [&]<class Cap>(Cap cap) {
            const auto a_row_a_block = [&](auto kernel, std::size_t shared_bytes) {
                launch(on, kernel, static_cast<unsigned>(rows_), block_size, shared_bytes, result_.data(),
                       losses_.data(), targets_.data(), columns_, vocabulary_, scale, cap, terms_.z_loss);
            };
            switch (variant) {
                case 1:
                    return a_row_a_block(classifier_kernel1<X, Cap>, 0);
                case 2:
                    return a_row_a_block(classifier_kernel2<X, Cap>, 0);
                case 3:
                    return a_row_a_block(classifier_kernel3<X, Cap>, 0);
                case 4:
                    return a_row_a_block(classifier_kernel4<X, Cap>,
                                         SharedAllocator::bytes<X>(static_cast<std::size_t>(columns_)));
                case 5:
                    return fused_classifier(on, result_.data(), losses_.data(), targets_.data(), rows_,
                                            columns_, vocabulary_, scale, true, terms_, block_size);
                default:
                    llmc::programming_error("no such variant");
            }
        });
    }

    void reset() override {
        result_.copy_from(logits_);
        losses_.clear();
    }

    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        for (std::int64_t row = 0; row < rows_; ++row) {
            const X* x = logits_.data() + row * columns_;
            const X* got = result_.data() + row * columns_;
            const int target = targets_[row];
            if (target == ignored_target) {
                comparison.see_equal("losses", row, losses_[row], 0);
                for (int v = 0; v < columns_; ++v) comparison.see_equal("dlogits", v, to_float(got[v]), 0);
                continue;
            }
            const double cap = terms_.cap, z = terms_.z_loss;
            const auto y = [&](int v) {
                return cap > 0 ? cap * std::tanh(to_float(x[v]) / cap) : double{to_float(x[v])};
            };
            double greatest = -HUGE_VAL, least = HUGE_VAL, sum = 0;
            for (int v = 0; v < vocabulary_; ++v) {
                greatest = std::max(greatest, y(v));
                least = std::min(least, y(v));
            }
            for (int v = 0; v < vocabulary_; ++v) sum += std::exp(y(v) - greatest);
            // A sum is added up by at least 32 threads, and their sums in a tree of 10 levels. That makes
            // `length` additions. A sum is scaled at most once per 4 additions (online softmax: an
            // exponential of 2 ulp, 4u, and a product, u). A term has the 2 ulp of exp (4u) and the rounding
            // of its argument: u times the argument, twice, since the constant log2(e) is rounded too. A
            // capped logit has an error of 18 u cap (soft_cap.cuh), and so has the greatest one.
            const double length = vocabulary_ / 32.0 + 18, range = greatest - least, cap_error = 18 * u * cap;
            const double term_error = (4 + 2 * range) * u + 2 * cap_error;
            const double sum_error = (length + 5 * (length / 4) + 2) * u + term_error;
            const double largest = std::max(std::fabs(greatest), std::fabs(least));
            const double lse = std::log(sum) + greatest;
            const double loss_error = sum_error + 4 * u * (2 * largest + std::log(sum) + 1) + 2 * cap_error;
            comparison.see("losses", row, losses_[row], lse - y(target), loss_error);
            const double factor = 1 + 2 * z * lse, factor_error = 2 * z * loss_error + 3 * u * factor;
            for (int v = 0; v < vocabulary_; ++v) {
                const double p = std::exp(y(v) - greatest) / sum;
                const double d = p * factor - (v == target ? 1 : 0);
                // The slope is 4t/(1 + t)^2. The argument of t = e^-2w, w = |x|/cap, has 3 roundings, t has
                // 2 ulp, and the other operations 10 u.
                const double w = cap > 0 ? std::fabs(to_float(x[v])) / cap : 0;
                const double slope = cap > 0 ? 1 - std::pow(y(v) / cap, 2) : 1;
                const double slope_error = cap > 0 ? (6 * w + 14) * u : 0;
                // 5u: the reciprocal and the products.
                const double error = (sum_error + term_error) * p * factor + factor_error * p +
                                     (5 * u + slope_error) * std::fabs(d);
                const double dlogit = d * scale * slope;
                comparison.see("dlogits", row * columns_ + v, to_float(got[v]), dlogit,
                               rounded<X>(dlogit, std::fabs(scale) * slope * error));
            }
            for (int v = vocabulary_; v < columns_; ++v) {
                comparison.see_equal("padding", row * columns_ + v, to_float(got[v]), 0);
            }
        }
    }

    double bytes() const override { return 2.0 * static_cast<double>(logits_.bytes()); }

  private:
    static constexpr float scale = 0.125f;
    std::int64_t rows_;
    int vocabulary_, columns_;
    llmc::ClassifierTerms terms_;
    Array<X> logits_, result_;
    Array<float> losses_;
    Array<std::int32_t> targets_;
};

const Registration registration({
    .name = "classifier",
    .sizes = {"rows", "vocabulary", "cap"},
    .variants = {{1, "a block does a row in three passes", {32, 256, 1024}},
                 {2, "16-byte loads", {32, 256, 1024}},
                 {3, "online softmax: two passes", {32, 256, 1024}},
                 {4, "the row waits in shared memory: one pass", {32, 256, 1024}},
                 {5, "the next row copied while this is written", {32, 256, 512, 1024}}},
    .checked = {{2, 37, 0}, {1, 1, 0}, {4, 1003, 0}, {2, 128, 0}, {2, 50257, 0}, {3, 37, 15}, {4, 1003, 15}},
    .timed = {{8192, 50257, 0}, {2048, 128256, 0}, {8192, 50257, 15}},
    // A row of variant 4 must fit the shared memory of the smallest chip.
    .takes =
        [](int variant, llmc::DType dtype, const Shape& shape) {
            const auto size = static_cast<std::int64_t>(llmc::size_of(dtype));
            return variant != 4 ||
                   blocks_for<std::int64_t>(shape[1], 128) * 128 * size + 1024 <= std::int64_t{99} << 10;
        },
    .make = make_problem<Classifier>,
    .checked_for_races = {{2, 37, 0}, {2, 37, 15}},
});

}  // namespace lab::classifier_variants
