// Operations that do nothing. A step with these takes only the host's time to launch operations.
#pragma once

#include <optional>
#include <span>

#include "llmc/device/ops.h"

namespace llmc::bench {

class IdleOps final : public Ops {
  public:
    void set_workspace(const Tensor&) override {}

    using T = const Tensor&;
    void encoder_forward(T, T, T, T, std::optional<std::int64_t>) override {}
    void encoder_backward(T, T, T, T, std::optional<std::int64_t>) override {}
    void layernorm_forward(T, T, T, T, T, T) override {}
    void layernorm_backward(T, T, T, T, T, T, T, T) override {}
    void fused_residual_layernorm_forward(T, T, T, T, T, T, T, T) override {}
    void rmsnorm_forward(T, T, T, T, float) override {}
    void rmsnorm_backward(T, T, T, T, T, T) override {}
    void fused_residual_rmsnorm_forward(T, T, T, T, T, T, float) override {}
    void matmul_forward(T, T, T, T, T) override {}
    void matmul_backward(T, T, T, T, T, T, T) override {}
    void gelu_forward(T, T) override {}
    void gelu_backward(T, T, T) override {}
    void swiglu_forward(T, T) override {}
    void swiglu_backward(T, T, T) override {}
    void relu_squared_forward(T, T) override {}
    void relu_squared_backward(T, T, T) override {}
    using H = const Heads&;
    void attention_forward(T, T, H, H, H, std::int64_t) override {}
    void attention_backward(H, H, H, T, H, H, H, T, T, std::int64_t) override {}
    void attention_cached_forward(T, T, H, H, H, std::int64_t, std::int64_t) override {}
    void rope(H, T, std::int64_t, bool) override {}
    void head_norm_forward(H, T, H, T, float, const std::optional<SharedRows>&) override {}
    void head_norm_sums(T, H) override {}
    void head_norm_backward(H, T, H, H, T, T, const std::optional<SharedRows>&) override {}
    void head_norm_backward_sums(T, H, H, T, T) override {}
    using Terms = const ClassifierTerms&;
    void fused_classifier(T, T, T, std::int64_t, float, bool, Terms) override {}
    void classifier_statistics(T, T, T, std::int64_t, std::int64_t, Terms) override {}
    void classifier_from_statistics(T, T, T, T, std::int64_t, std::int64_t, float, bool, Terms) override {}
    void soft_cap(T, T, float) override {}
    void global_norm_squared(T, T) override {}
    void sum(T, T) override {}
    void adamw(T, T, T, T, T, T, std::span<const AdamWSegment>, const AdamWStep&,
               const std::optional<StochasticRounding>&, const std::optional<StochasticRounding>&,
               const EightBitMoments&) override {}
    void amax(T, T) override {}
    void quantise(T, T, T, Fp8) override {}
    void cast(T, T) override {}
    void copy(T, T) override {}
    void fill(T, float) override {}
    void add(T, T, T) override {}
    void accumulate(T, T, const StochasticRounding&, std::int64_t) override {}
    void all_finite(T, T) override {}
};

}  // namespace llmc::bench
