// The gradient norm, fp64 sums of metrics, and AdamW.
#include <algorithm>
#include <array>
#include <cmath>

#include "llmc/device/adamw.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/eight_bit_moments.h"
#include "llmc/device/stochastic_rounding.h"

namespace llmc::cpu {

namespace {

// An element's bits do not depend on whether it is in the vector body of the loop or in its tail, and so not on where
// a shard begins or ends. The square root becomes an instruction only if the compiler need not set errno
// (-fno-math-errno).
template <class Gradient>
void update(float* w, float* m, float* v, const Gradient* gradients, std::int64_t n, float keep, float clip,
            const AdamWCoefficients& coefficients) {
    const AdamWCoefficients k = coefficients;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i)
        adamw_update(w[i], m[i], v[i], to_float(gradients[i]), clip, keep, k);
}

template <class X>
void round_to_nearest(X* to, const float* from, std::int64_t n) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) to[i] = from_float<X>(from[i]);
}

// A few elements of a tensor in fp32: those in memory, or widened copies of bf16, which store() rounds.
class Widened {
  public:
    static constexpr std::int64_t most = 1024;

    Widened(const Tensor& tensor, std::int64_t begin, std::int64_t end)
        : tensor_(tensor), begin_(begin), end_(end) {
        if (tensor.dtype == DType::fp32) {
            values_ = tensor.as<float>() + begin;
            return;
        }
        const bfloat16* from = tensor.as<bfloat16>() + begin;
        values_ = copy_.data();
#pragma omp simd
        for (std::int64_t i = 0; i < end - begin; ++i) values_[i] = to_float(from[i]);
    }

    float* values() { return values_; }
    void store(const std::optional<StochasticRounding>& rounding, std::int64_t step, Rounded what) {
        if (tensor_.dtype == DType::fp32) return;
        round_stochastically(tensor_.as<bfloat16>(), values_, begin_, end_, *rounding, step, what);
    }

  private:
    Tensor tensor_;
    std::int64_t begin_, end_;
    float* values_;
    std::array<float, most> copy_;
};

// Rounds updated weights into the parameters [first, last), if they have another format.
void round_weights(const Tensor& parameters, const float* weights, std::int64_t first, std::int64_t last,
                   const std::optional<StochasticRounding>& rounding, std::int64_t step) {
    if (rounding) {
        round_stochastically(parameters.as<bfloat16>(), weights, first, last, *rounding, step);
    } else if (parameters.dtype != DType::fp32) {
        with_dtype(parameters.dtype, [&](auto x) {
            round_to_nearest(parameters.as<decltype(x)>() + first, weights, last - first);
        });
    }
}

// One moment of a block in fp32, which store() rounds to 8 bits.
class Block {
  public:
    Block(const Tensor& entries, const Tensor& amax, std::int64_t number, const EightBitTable& table)
        : entries_(entries.as<std::uint8_t>() + number * eight_bit_block),
          amax_(amax.as<float>()[number]),
          table_(table) {
        from_8_bits(values_, entries_, amax_, table);
    }
    float* at(std::int64_t offset) { return values_.data() + offset; }
    void store() { amax_ = to_8_bits(entries_, values_, table_); }

  private:
    std::uint8_t* entries_;
    float& amax_;
    const EightBitTable& table_;
    std::array<float, eight_bit_block> values_;
};

}  // namespace

void CpuOps::compute(const GlobalNormSquared& op, std::int64_t n) {
    const std::int64_t blocks = n / norm_block_elements;
    with_dtype(op.x.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_, blocks,
                     [to = op.partials.as<float>(), all = op.x.as<X>()](std::int64_t block) {
                         const X* values = all + block * norm_block_elements;
                         to[block] = lane_sum<float>(norm_block_elements, [=](std::int64_t i) {
                             return to_float(values[i]) * to_float(values[i]);
                         });
                     });
    });
}

void CpuOps::compute(const llmc::Sum& op, std::int64_t n) {
    constexpr std::int64_t parts = 64;
    std::array<double, parts> partial{};

    const std::int64_t size = divide_up(n, parts);
    parallel_for(threads_for(n, threads_), parts, [=, &partial, all = op.x.as<float>()](std::int64_t part) {
        const float* values = all + part * size;
        const std::int64_t count = std::min(size, n - part * size);
        partial[static_cast<std::size_t>(part)] =
            lane_sum<double>(count, [=](std::int64_t i) { return double{values[i]}; });
    });
    double total = 0.0;
    for (const double part : partial) total += part;
    *op.out.as<double>() += total;
}

void CpuOps::compute(const AdamW& op, std::int64_t n) {
    const double squared = *op.norm_squared.as<double>();
    if (!std::isfinite(squared)) return;
    const AdamWCoefficients coefficients = adamw_coefficients(op.step);
    const float clip = adamw_clip(squared, coefficients);
    const auto keep_of = [&](const AdamWSegment& segment) {
        return adamw_keep(op.step.learning_rate, segment.weight_decay);
    };
    if (op.m.dtype == DType::uint8) {
        with_dtype(op.gradients.dtype, [&](auto element) {
            const auto* const g = op.gradients.as<decltype(element)>();
            parallel_for(threads_, n / eight_bit_block, [&](std::int64_t number) {
                const std::int64_t start = number * eight_bit_block;
                Block of_m(op.m, op.in_8_bits.m_amax, number, table_of_first_moments()),
                    of_v(op.v, op.in_8_bits.v_amax, number, table_of_second_moments());
                for (const AdamWSegment& segment : op.segments) {
                    const std::int64_t first = std::max(start, segment.begin),
                                       last = std::min(start + eight_bit_block, segment.end);
                    if (first >= last) continue;
                    const std::int64_t small = segment.in_small + first - segment.begin;
                    const bool is_small = segment.in_small >= 0;
                    if (is_small) {
                        std::fill_n(of_m.at(first - start), last - first, 0.0F);
                        std::fill_n(of_v.at(first - start), last - first, 0.0F);
                    }
                    Widened w(op.master, first, last);
                    update(w.values(), is_small ? op.in_8_bits.m.as<float>() + small : of_m.at(first - start),
                           is_small ? op.in_8_bits.v.as<float>() + small : of_v.at(first - start), g + first,
                           last - first, keep_of(segment), clip, coefficients);
                    round_weights(op.parameters, w.values(), first, last, op.rounding, op.step.step);
                }
                of_m.store();
                of_v.store();
            });
        });
        return;
    }
    with_dtype(op.gradients.dtype, [&](auto element) {
        using Gradient = decltype(element);
        parallel_pieces(threads_, n, [&](std::int64_t piece_begin, std::int64_t piece_end) {
            for (const AdamWSegment& segment : op.segments) {
                const std::int64_t begin = std::max(piece_begin, segment.begin);
                const std::int64_t end = std::min(piece_end, segment.end);
                for (std::int64_t first = begin; first < end; first += Widened::most) {
                    const std::int64_t last = std::min(first + Widened::most, end);
                    Widened w(op.master, first, last), m_here(op.m, first, last), v_here(op.v, first, last);
                    update(w.values(), m_here.values(), v_here.values(), op.gradients.as<Gradient>() + first,
                           last - first, keep_of(segment), clip, coefficients);
                    m_here.store(op.rounding_of_moments, op.step.step, Rounded::first_moment);
                    v_here.store(op.rounding_of_moments, op.step.step, Rounded::second_moment);
                    round_weights(op.parameters, w.values(), first, last, op.rounding, op.step.step);
                }
            }
        });
    });
}

}  // namespace llmc::cpu
