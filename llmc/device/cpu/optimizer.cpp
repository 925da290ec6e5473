// The gradient norm, fp64 sums of metrics, and the update.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/eight_bit_state.h"
#include "llmc/device/stochastic_rounding.h"
#include "llmc/optim/formulas.h"

namespace llmc::cpu {

namespace {

// An element's bits do not depend on whether it is in the vector body of the loop or in its tail, and so not on where
// a shard begins or ends. The square root becomes an instruction only if the compiler need not set errno
// (-fno-math-errno).
template <class Formula, class Gradient, class... State>
void update_elements(const Formula& formula, float* w, const Gradient* gradients, std::int64_t n, float clip,
                     const UpdateRates& rates, State*... state) {
    const Formula f = formula;
    const UpdateRates r = rates;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) f.update(w[i], clip * to_float(gradients[i]), r, state[i]...);
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

// One tensor of state of a block in fp32, which store() rounds to 8 bits.
class Block {
  public:
    Block(const UpdateState& state, std::int64_t number, bool has_sign)
        : entries_(state.values.as<std::uint8_t>() + number * eight_bit_block),
          amax_(state.amax.as<float>()[number]),
          packed_(state.packed ? state.packed.as<float>() : nullptr),
          table_(table_in_8_bits(has_sign)) {
        from_8_bits(values_, entries_, amax_, table_);
    }
    // A run of elements. Those of a small tensor lie outside, from its place in_packed on, and count as 0 here.
    float* at(std::int64_t offset, std::int64_t count, std::int64_t in_packed) {
        float* const here = values_.data() + offset;
        if (in_packed < 0) return here;
        std::fill_n(here, count, 0.0F);
        return packed_ + in_packed;
    }
    void store() { amax_ = to_8_bits(entries_, values_, table_); }

  private:
    std::uint8_t* entries_;
    float& amax_;
    float* packed_;
    const EightBitTable& table_;
    std::array<float, eight_bit_block> values_;
};

// A step of an optimizer with this formula.
template <class Formula>
class FormulaUpdate {
  public:
    explicit FormulaUpdate(const OptimizerUpdate& op)
        : op_(op),
          numbers_(StepNumbers<Formula>::of(op.step)),
          clip_(numbers_.clip(*op.norm_squared.as<double>())) {}

    void run(int threads, std::int64_t n) const {
        with_dtype(op_.gradients.dtype, [&](auto element) {
            const auto* const gradients = op_.gradients.as<decltype(element)>();
            if (Formula::states > 0 && op_.state.front().values.dtype == DType::uint8) {
                parallel_for(threads, n / eight_bit_block,
                             [&](std::int64_t block) { update_block(block, gradients, each_state); });
            } else {
                parallel_pieces(threads, n, [&](std::int64_t begin, std::int64_t end) {
                    update_piece(begin, end, gradients, each_state);
                });
            }
        });
    }

  private:
    static constexpr auto each_state = std::make_index_sequence<static_cast<std::size_t>(Formula::states)>();

    // Updates the elements [first, last) of a segment, whose state begins at these places.
    template <class Gradient, class... State>
    void update_run(const UpdateSegment& segment, std::int64_t first, std::int64_t last,
                    const Gradient* gradients, State*... state) const {
        Widened w(op_.master, first, last);
        update_elements(numbers_.formula, w.values(), gradients + first, last - first, clip_,
                        numbers_.rates(segment.weight_decay, segment.rate_factor), state...);
        round_weights(op_.parameters, w.values(), first, last, op_.rounding, op_.step.step);
    }

    // Calls f(segment, first, last) for the part of each segment in [begin, end).
    template <class F>
    void for_each_part(std::int64_t begin, std::int64_t end, const F& f) const {
        for (const UpdateSegment& segment : op_.segments) {
            const std::int64_t first = std::max(begin, segment.begin), last = std::min(end, segment.end);
            if (first < last) f(segment, first, last);
        }
    }

    template <class Gradient, std::size_t... I>
    void update_block(std::int64_t number, const Gradient* gradients, std::index_sequence<I...>) const {
        const std::int64_t start = number * eight_bit_block;
        std::array<Block, sizeof...(I)> blocks{
            Block(op_.state[I], number, Formula::description.state[I].has_sign)...};
        for_each_part(start, start + eight_bit_block,
                      [&](const UpdateSegment& segment, auto first, auto last) {
                          [[maybe_unused]] const std::int64_t packed =
                              segment.in_packed < 0 ? -1 : segment.in_packed + first - segment.begin;
                          update_run(segment, first, last, gradients,
                                     blocks[I].at(first - start, last - first, packed)...);
                      });
        (blocks[I].store(), ...);
    }

    template <class Gradient, std::size_t... I>
    void update_piece(std::int64_t begin, std::int64_t end, const Gradient* gradients,
                      std::index_sequence<I...>) const {
        for_each_part(begin, end, [&](const UpdateSegment& segment, auto from, auto to) {
            for (std::int64_t first = from; first < to; first += Widened::most) {
                const std::int64_t last = std::min(first + Widened::most, to);
                [[maybe_unused]] std::array<Widened, sizeof...(I)> state{
                    Widened(op_.state[I].values, first, last)...};
                update_run(segment, first, last, gradients, state[I].values()...);
                (state[I].store(op_.rounding_of_state, op_.step.step, rounded_state(I)), ...);
            }
        });
    }

    const OptimizerUpdate& op_;
    StepNumbers<Formula> numbers_;
    float clip_;
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

void CpuOps::compute(const Momentum& op, std::int64_t n) {
    const double squared = *op.norm_squared.as<double>();
    if (!std::isfinite(squared)) return;
    const auto numbers = StepNumbers<MuonMomentum>::of(op.step);
    const float clip = numbers.clip(squared);
    const auto update = [&](auto* out, const auto* gradients, std::int64_t first, std::int64_t last) {
        Widened state(op.state, first, last);
        float* const m = state.values();
        const MuonMomentum formula = numbers.formula;
#pragma omp simd
        for (std::int64_t i = first; i < last; ++i)
            out[i] = from_float<std::decay_t<decltype(*out)>>(
                formula.update(clip * to_float(gradients[i]), m[i - first]));
        state.store(op.rounding_of_state, op.step.step, rounded_state(0));
    };
    with_dtype(op.out.dtype, [&](auto x) {
        with_dtype(op.gradients.dtype, [&](auto gradient) {
            parallel_pieces(threads_, n, [&](std::int64_t begin, std::int64_t end) {
                for (const UpdateSegment& segment : op.segments) {
                    const std::int64_t from = std::max(begin, segment.begin), to = std::min(end, segment.end);
                    for (std::int64_t first = from; first < to; first += Widened::most)
                        update(op.out.as<decltype(x)>(), op.gradients.as<decltype(gradient)>(), first,
                               std::min(first + Widened::most, to));
                }
            });
        });
    });
}

void CpuOps::compute(const OptimizerUpdate& op, std::int64_t n) {
    if (!std::isfinite(*op.norm_squared.as<double>())) return;
    with_formula(op.optimizer, [&]<class Formula>() { FormulaUpdate<Formula>(op).run(threads_, n); });
}

}  // namespace llmc::cpu
