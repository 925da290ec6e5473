// AdamW, in four variants: updates the parameters of a unit, a flat buffer of tensors (segments). Matrices
// decay, the others do not (llmc/device/ops.h). The unit here is a block of GPT-2: twelve tensors.
//
// An element reads its fp32 master copy, its two moments and its gradient. It writes all of them but the
// gradient, and the bf16 parameter. That is 30 bytes (28 in fp32, or with gradients in bf16), about 20
// operations, a square root and two divisions. Memory is the limit: a block of the 124M model (7.1M elements)
// moves 213 MB. A GPU with 3 TB/s needs at least 71 us for that. The variants:
//   1  A thread does an element, a launch does a tensor. Accesses are coalesced. But 8 of the 12 tensors are
//      vectors of C to 4C elements, whose launches cost microseconds for nanoseconds of work. Every thread
//      also computes a root and a quotient in fp64 for the clip, which is slow on chips with few fp64 units
//      (sm_86: 2 per clock).
//   2  One launch for the unit. The segments are kernel parameters: a thread finds its segment in constant
//      memory. Padding belongs to no segment.
//   3  Four elements per thread: 16-byte accesses, a quarter of the instructions and of the searches.
//   4  A persistent grid. A block computes the clip and the decay once. A thread does two quads, so that
//      eight loads are in flight before the first is used. Accesses have streaming hints, since nothing is
//      read again before the next step (llmc/device/cuda/update.cuh). It also takes gradients in bf16, and can
//      round the parameters at random.
#include "llmc/device/cuda/update.cuh"

#include <vector>

#include "dev/lab/lab.h"

namespace lab::adamw_variants {

using namespace llmc::cuda;
using llmc::UpdateRates;
using llmc::UpdateSegment;
using llmc::UpdateStep;
using Numbers = llmc::StepNumbers<llmc::AdamW>;

// The pointers of a launch.
struct Buffers {
    float *master, *m, *v;
    const float* gradients;
    const double* norm_squared;
    const Numbers* numbers;
};

template <class X>
__device__ __forceinline__ void update_element(X* parameters, const Buffers& b, std::int64_t i,
                                               double weight_decay) {
    if (!std::isfinite(*b.norm_squared)) return;
    const Numbers& k = *b.numbers;
    const float clip = k.clip(*b.norm_squared);
    k.formula.update(b.master[i], clip * b.gradients[i], k.rates(weight_decay, 1), b.m[i], b.v[i]);
    if constexpr (!std::is_same_v<X, float>) parameters[i] = from_float<X>(b.master[i]);
}

template <class X>
__global__ void adamw_kernel1(X* parameters, Buffers buffers, UpdateSegment segment) {
    const std::int64_t i = segment.begin + grid_thread();
    if (i < segment.end) update_element(parameters, buffers, i, segment.weight_decay);
}

// The segment of an element; -1 for padding.
__device__ __forceinline__ int find_segment(const UpdateSegments& segments, std::int64_t i) {
    for (int s = 0; s < segments.count; ++s) {
        if (i < segments.segments[s].end) return i >= segments.segments[s].begin ? s : -1;
    }
    return -1;
}

template <class X>
__global__ void adamw_kernel2(X* parameters, Buffers buffers, UpdateSegments segments) {
    const std::int64_t i = grid_thread();
    const int segment = find_segment(segments, i);
    if (segment >= 0) update_element(parameters, buffers, i, segments.segments[segment].weight_decay);
}

template <class X>
__global__ void adamw_kernel3(X* parameters, Buffers buffers, UpdateSegments segments) {
    const std::int64_t i = 4 * grid_thread();
    const int segment = find_segment(segments, i);
    if (segment < 0 || !std::isfinite(*buffers.norm_squared)) return;
    const Numbers k = *buffers.numbers;
    const float clip = k.clip(*buffers.norm_squared);
    const UpdateRates rates = k.rates(segments.segments[segment].weight_decay, 1);
    Packed<float> w = load(buffers.master + i), m = load(buffers.m + i), v = load(buffers.v + i);
    const Packed<float> g = load(buffers.gradients + i);
    for (int e = 0; e < 4; ++e) k.formula.update(w[e], clip * g[e], rates, m[e], v[e]);
    store(buffers.master + i, w);
    store(buffers.m + i, m);
    store(buffers.v + i, v);
    if constexpr (!std::is_same_v<X, float>) {
        Quad<X> rounded;
        for (int e = 0; e < 4; ++e) rounded[e] = from_float<X>(w[e]);
        store_quad(parameters + i, rounded);
    }
}

// The segments of a block of GPT-2 with `channels`. Every tensor begins at a multiple of 128 elements.
std::vector<UpdateSegment> block_segments(std::int64_t channels) {
    const std::int64_t C = channels;
    const std::int64_t vectors[] = {C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C, 4 * C * C, C};
    std::vector<UpdateSegment> segments;
    std::int64_t begin = 0;
    for (const std::int64_t elements : vectors) {
        segments.push_back({begin, begin + elements, elements >= C * C ? 0.1 : 0.0});
        begin = (begin + elements + 127) / 128 * 128;
    }
    return segments;
}

template <class X, class Gradient>
class AdamW : public Problem {
  public:
    AdamW(const Shape& shape, Draw& draw)
        : segments_(block_segments(shape[0])),
          n_((segments_.back().end + 127) / 128 * 128),
          w0_(n_),
          m0_(n_),
          v0_(n_),
          gradients_(n_),
          w_(n_),
          m_(n_),
          v_(n_),
          parameters_(n_),
          norm_squared_(1),
          numbers_(1) {
        draw.normal(w0_, 0.02);
        draw.normal(m0_, 0.1);
        draw.normal(v0_, 0.1);
        for (std::int64_t i = 0; i < n_; ++i) v0_[i] *= v0_[i];
        draw.normal(gradients_, 1);
        norm_squared_[0] = 7.5;
        numbers_[0] = Numbers::of(step_);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        if (variant == 4) {
            const UpdateBuffers<llmc::AdamW, X, float, float, Gradient> buffers{
                parameters_.data(), w_.data(), {m_.data(), v_.data()}, gradients_.data()};
            return llmc::cuda::update(on, buffers, norm_squared_.data(), numbers_.data(), segments_, {}, {},
                                      block_size);
        }
        if constexpr (std::is_same_v<Gradient, float>) return run_earlier(variant, block_size, on);
        llmc::programming_error("no such variant");
    }

    void run_earlier(int variant, int block_size, const LaunchContext& on) {
        const Buffers buffers{w_.data(),      m_.data(), v_.data(), gradients_.data(), norm_squared_.data(),
                              numbers_.data()};
        X* parameters = parameters_.data();
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        UpdateSegments all{};
        for (const UpdateSegment& segment : segments_) all.segments[all.count++] = segment;
        switch (variant) {
            case 1:
                for (const UpdateSegment& segment : segments_) {
                    launch(on, adamw_kernel1<X>, blocks(segment.end - segment.begin), block_size, 0,
                           parameters, buffers, segment);
                }
                return;
            case 2:
                return launch(on, adamw_kernel2<X>, blocks(n_), block_size, 0, parameters, buffers, all);
            case 3:
                return launch(on, adamw_kernel3<X>, blocks(n_ / 4), block_size, 0, parameters, buffers, all);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        w_.copy_from(w0_);
        m_.copy_from(m0_);
        v_.copy_from(v0_);
        parameters_.clear();
    }

    void compare(Comparison& comparison) override {
        std::int64_t padding = 0;
        const auto see_untouched = [&](std::int64_t until) {
            for (; padding < until; ++padding) {
                comparison.see_equal("padding of w", padding, w_[padding], w0_[padding]);
                comparison.see_equal("padding of m", padding, m_[padding], m0_[padding]);
                comparison.see_equal("padding of v", padding, v_[padding], v0_[padding]);
            }
        };
        for (const UpdateSegment& segment : segments_) {
            see_untouched(segment.begin);
            for (std::int64_t i = segment.begin; i < segment.end; ++i) {
                see_element(comparison, i, segment.weight_decay);
            }
            padding = segment.end;
        }
        see_untouched(n_);
    }

    double bytes() const override {
        return static_cast<double>(n_) * (24.0 + sizeof(Gradient) + (sizeof(X) == 4 ? 0.0 : sizeof(X)));
    }

  private:
    // First-order bounds: u for each coefficient, which is rounded, and for each operation. The factor 1.01
    // covers the products of errors.
    void see_element(Comparison& comparison, std::int64_t i, double weight_decay) {
        const UpdateStep& s = step_;
        const double u = 1.01 * unit_roundoff<float>, tiny = 0x1p-126;
        const double clip = std::min(1.0, s.max_grad_norm / (std::sqrt(norm_squared_[0]) + 1e-6));
        const double g = clip * to_float(gradients_[i]);  // 2 u
        const double m = beta1 * m0_[i] + (1 - beta1) * g;
        const double m_error =
            u * (std::fabs(beta1 * m0_[i]) + 4 * std::fabs((1 - beta1) * g) + std::fabs(m)) + tiny;
        const double v = beta2 * v0_[i] + (1 - beta2) * g * g;  // no term is negative: 7 u of g^2, 1 u
        const double v_error = 8 * u * v + tiny;
        const double correction1 = 1 - std::pow(beta1, static_cast<double>(s.step));
        const double correction2 = 1 - std::pow(beta2, static_cast<double>(s.step));
        // The root halves v's error to 4 u. The root, the correction, the quotient and the sum are rounded, 1
        // u each: 8 u. Another 3 u are for m / denominator, the step size, and their product.
        const double denominator = std::sqrt(v) / std::sqrt(correction2) + eps;
        const double update = s.learning_rate / correction1 * m / denominator;
        const double update_error =
            s.learning_rate / correction1 * m_error / denominator + 11 * u * std::fabs(update);
        const double kept = w0_[i] * (1 - s.learning_rate * weight_decay);
        const double w = kept - update;
        const double w_error = u * (std::fabs(kept) + std::fabs(w)) + update_error + tiny;
        comparison.see("m", i, m_[i], m, m_error);
        comparison.see("v", i, v_[i], v, v_error);
        comparison.see("w", i, w_[i], w, w_error);
        if constexpr (!std::is_same_v<X, float>) {
            comparison.see_equal("parameters", i, to_float(parameters_[i]), to_float(from_float<X>(w_[i])));
        }
    }

    static constexpr double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    const UpdateStep step_{
        .step = 3, .learning_rate = 1e-3, .numbers = {beta1, beta2, eps}, .max_grad_norm = 1};
    std::vector<UpdateSegment> segments_;
    std::int64_t n_;
    Array<float> w0_, m0_, v0_;
    Array<Gradient> gradients_;
    Array<float> w_, m_, v_;
    Array<X> parameters_;
    Array<double> norm_squared_;
    Array<Numbers> numbers_;
};

std::unique_ptr<Problem> make(llmc::DType dtype, const Shape& shape, Draw& draw) {
    if (dtype == llmc::DType::fp32) return std::make_unique<AdamW<float, float>>(shape, draw);
    if (dtype == llmc::DType::fp16) return std::make_unique<AdamW<fp16, float>>(shape, draw);
    if (shape[1] == 4) return std::make_unique<AdamW<bf16, float>>(shape, draw);
    return std::make_unique<AdamW<bf16, bf16>>(shape, draw);
}

const Registration registration({
    .name = "adamw",
    .sizes = {"channels", "bytes a gradient"},
    .variants = {{1, "one thread per element, one launch per tensor", {64, 256}},
                 {2, "one launch for the unit", {64, 256}},
                 {3, "four elements a thread", {64, 256}},
                 {4, "a persistent grid, eight loads in flight", {32, 128, 256}}},
    .checked = {{8, 4}, {40, 4}, {40, 2}},
    .timed = {{768, 4}, {1600, 4}, {768, 2}, {1600, 2}},
    .takes = [](int variant, llmc::DType dtype,
                const Shape& shape) { return shape[1] == 4 || (variant == 4 && dtype == llmc::DType::bf16); },
    .make = make,
});

}  // namespace lab::adamw_variants
