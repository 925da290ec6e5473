// Softmax and cross-entropy of the logits, with the gradient in place: for whole rows, or for the columns
// that a rank holds.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/activation_math.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

// softmax_v = exp(l_v - greatest) / sum. No exponential overflows; the largest is 1.
struct Softmax {
    float greatest;
    float sum;
};

// The softmax of capped logits. If `vocabulary` is 0, `greatest` is -infinity and `sum` is 0.
template <class X, class Cap>
Softmax softmax_of_row(const X* logits, std::int64_t vocabulary, Cap cap) {
    float greatest = -infinity;
#pragma omp simd reduction(max : greatest)
    for (std::int64_t v = 0; v < vocabulary; ++v) {
        const float l = to_float(logits[v]);
        greatest = l > greatest ? l : greatest;
    }
    // The greatest logit has the greatest capped one.
    if (vocabulary > 0) greatest = cap(greatest).value;
    const float sum = lane_sum<float>(
        vocabulary, [=](std::int64_t v) { return exponential(cap(to_float(logits[v])).value - greatest); });
    return {greatest, sum};
}

float loss_of(Softmax softmax, float target_logit) {
    return std::log(softmax.sum) - (target_logit - softmax.greatest);
}

// The factor of a row's exponentials in the gradient: 1/sum, and with a z-loss also 1 + 2 z lse.
float factor_of(Softmax softmax, float z_loss) {
    const float reciprocal = 1.0F / softmax.sum;
    if (z_loss == 0.0F) return reciprocal;
    return reciprocal * (1.0F + 2.0F * z_loss * (std::log(softmax.sum) + softmax.greatest));
}

// Writes the gradient of the first `columns` logits and zeros into the rest of the `padded_columns`. `target`
// is the target's column, or -1 if this rank does not hold it.
template <class X, class Cap>
void write_row_gradient(X* logits, std::int64_t columns, std::int64_t padded_columns, std::int64_t target,
                        Softmax softmax, float scale, Cap cap, float z_loss) {
    const Capped target_logit = cap(target >= 0 ? to_float(logits[target]) : 0.0F);
    const float factor = factor_of(softmax, z_loss);
#pragma omp simd
    for (std::int64_t v = 0; v < columns; ++v) {
        const Capped y = cap(to_float(logits[v]));
        const float p = exponential(y.value - softmax.greatest) * factor;
        logits[v] = from_float<X>(p * scale * y.slope);
    }
    if (target >= 0) {
        const float p = exponential(target_logit.value - softmax.greatest) * factor;
        logits[target] = from_float<X>((p - 1.0F) * scale * target_logit.slope);
    }
    std::fill(logits + columns, logits + padded_columns, X{});
}

// The columns of the vocabulary that this rank holds.
struct OwnColumns {
    std::int64_t first, count;

    // The column of a target, or -1 if this rank does not hold it.
    std::int64_t of(std::int32_t target) const {
        const std::int64_t column = target - first;
        return column >= 0 && column < count ? column : -1;
    }
};

struct RowStatistics {
    Softmax softmax;
    float target_logit;
};
static_assert(sizeof(RowStatistics) == classifier_statistics_numbers * sizeof(float));

// The statistics of a whole row. statistics_of_rank(r) returns those of the columns of rank r.
template <class OfRank>
RowStatistics combined(std::int64_t ranks, const OfRank& statistics_of_rank) {
    RowStatistics all{{-infinity, 0.0F}, 0.0F};
    for (std::int64_t r = 0; r < ranks; ++r) {
        all.softmax.greatest = std::max(all.softmax.greatest, statistics_of_rank(r).softmax.greatest);
    }
    for (std::int64_t r = 0; r < ranks; ++r) {
        const RowStatistics s = statistics_of_rank(r);
        all.softmax.sum += s.softmax.sum * exponential(s.softmax.greatest - all.softmax.greatest);
        all.target_logit += s.target_logit;
    }
    return all;
}

// Calls f(element, cap) with the type of the elements and that of the cap.
template <class F>
void with_types(DType dtype, float cap, const F& f) {
    with_dtype(dtype, [&](auto element) {
        if (cap > 0.0F) return f(element, SoftCap(cap));
        f(element, NoCap{});
    });
}

void check_targets(const Tensor& targets) {
    const auto ids = targets.span<std::int32_t>();
    check(std::all_of(ids.begin(), ids.end(), [](auto id) { return id == ignored_target || id >= 0; }),
          "every target is in the vocabulary or is ignored_target");
}

}  // namespace

void CpuOps::compute(const FusedClassifier& op, const RowSizes& sizes) {
    const std::int64_t N = sizes.rows, Vp = sizes.channels;
    const auto ids = op.targets.span<std::int32_t>();
    check(std::all_of(ids.begin(), ids.end(),
                      [&](auto id) { return id == ignored_target || (id >= 0 && id < op.vocabulary); }),
          "every target is in the vocabulary or is ignored_target");
    with_types(op.logits.dtype, op.terms.cap, [&](auto element, auto cap) {
        using X = decltype(element);
        parallel_for(
            threads_, N,
            [&, z = op.terms.z_loss, l = op.logits.as<X>(), loss = op.losses.as<float>()](std::int64_t n) {
                X* const row = l + n * Vp;
                const std::int32_t target = ids[static_cast<std::size_t>(n)];
                if (target == ignored_target) {
                    loss[n] = 0.0F;
                    if (op.write_dlogits) std::fill(row, row + Vp, X{});
                    return;
                }
                const Softmax softmax = softmax_of_row(row, op.vocabulary, cap);
                loss[n] = loss_of(softmax, cap(to_float(row[target])).value);
                if (op.write_dlogits)
                    write_row_gradient(row, op.vocabulary, Vp, target, softmax, op.scale, cap, z);
            });
    });
}

void CpuOps::compute(const ClassifierStatistics& op, const RowSizes& s) {
    check_targets(op.targets);
    const OwnColumns own{op.first_column, op.columns};
    with_types(op.logits.dtype, op.terms.cap, [&](auto element, auto cap) {
        using X = decltype(element);
        parallel_for(threads_, s.rows,
                     [&, l = op.logits.as<X>(), ids = op.targets.as<std::int32_t>(),
                      out = reinterpret_cast<RowStatistics*>(op.statistics.as<float>())](std::int64_t n) {
                         if (ids[n] == ignored_target) {
                             out[n] = {{-infinity, 0.0F}, 0.0F};
                             return;
                         }
                         const X* row = l + n * s.channels;
                         const std::int64_t target = own.of(ids[n]);
                         out[n] = {softmax_of_row(row, op.columns, cap),
                                   target >= 0 ? cap(to_float(row[target])).value : 0.0F};
                     });
    });
}

void CpuOps::compute(const ClassifierFromStatistics& op, const ClassifierSizes& s) {
    check_targets(op.targets);
    const OwnColumns own{op.first_column, op.columns};
    with_types(op.logits.dtype, op.terms.cap, [&](auto element, auto cap) {
        using X = decltype(element);
        parallel_for(threads_, s.rows,
                     [&, z = op.terms.z_loss, l = op.logits.as<X>(), loss = op.losses.as<float>(),
                      ids = op.targets.as<std::int32_t>(),
                      statistics = reinterpret_cast<const RowStatistics*>(op.all_statistics.as<float>())](
                         std::int64_t n) {
                         X* const row = l + n * s.channels;
                         if (ids[n] == ignored_target) {
                             loss[n] = 0.0F;
                             if (op.write_dlogits) std::fill(row, row + s.channels, X{});
                             return;
                         }
                         const RowStatistics all =
                             combined(s.ranks, [=](std::int64_t r) { return statistics[r * s.rows + n]; });
                         loss[n] = loss_of(all.softmax, all.target_logit);
                         if (op.write_dlogits) {
                             write_row_gradient(row, op.columns, s.channels, own.of(ids[n]), all.softmax,
                                                op.scale, cap, z);
                         }
                     });
    });
}

}  // namespace llmc::cpu
