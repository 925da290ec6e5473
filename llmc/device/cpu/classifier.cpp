// Softmax and cross-entropy of the vocabulary's logits, with the gradient in place.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/lane_sum.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/op_sizes.h"

namespace llmc::cpu {

namespace {

// softmax_v = exp(l_v - greatest) / sum: no exponential overflows, and the greatest is 1.
struct Softmax {
    float greatest;
    float sum;
};

template <class X>
Softmax softmax_of_row(const X* logits, std::int64_t vocabulary) {
    float greatest = -infinity;
#pragma omp simd reduction(max : greatest)
    for (std::int64_t v = 0; v < vocabulary; ++v) {
        const float l = to_float(logits[v]);
        greatest = l > greatest ? l : greatest;
    }
    const float sum = lane_sum<float>(
        vocabulary, [=](std::int64_t v) { return exponential(to_float(logits[v]) - greatest); });
    return {greatest, sum};
}

template <class X>
void write_row_gradient(X* logits, std::int64_t vocabulary, std::int64_t columns, std::int32_t target,
                        Softmax softmax, float scale) {
    const float target_logit = to_float(logits[target]);
    const float reciprocal = 1.0F / softmax.sum;
#pragma omp simd
    for (std::int64_t v = 0; v < vocabulary; ++v) {
        const float p = exponential(to_float(logits[v]) - softmax.greatest) * reciprocal;
        logits[v] = from_float<X>(p * scale);
    }
    const float p = exponential(target_logit - softmax.greatest) * reciprocal;
    logits[target] = from_float<X>((p - 1.0F) * scale);
    std::fill(logits + vocabulary, logits + columns, X{});
}

}  // namespace

void CpuOps::fused_classifier(const Tensor& logits, const Tensor& losses, const Tensor& targets,
                              std::int64_t vocabulary, float scale, bool write_dlogits) {
    const auto [N, Vp] = classifier_sizes(logits, losses, targets, vocabulary);
    const auto ids = targets.span<std::int32_t>();
    check(std::all_of(ids.begin(), ids.end(),
                      [=](auto id) { return id == ignored_target || (id >= 0 && id < vocabulary); }),
          "a target is in the vocabulary or ignored");
    with_dtype(logits.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_, N,
                     [=, Vp = Vp, l = logits.as<X>(), loss = losses.as<float>()](std::int64_t n) {
                         X* const row = l + n * Vp;
                         const std::int32_t target = ids[static_cast<std::size_t>(n)];
                         if (target == ignored_target) {
                             loss[n] = 0.0F;
                             if (write_dlogits) std::fill(row, row + Vp, X{});
                             return;
                         }
                         const Softmax softmax = softmax_of_row(row, vocabulary);
                         loss[n] = std::log(softmax.sum) - (to_float(row[target]) - softmax.greatest);
                         if (write_dlogits) write_row_gradient(row, vocabulary, Vp, target, softmax, scale);
                     });
    });
}

}  // namespace llmc::cpu
