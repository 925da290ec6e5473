// AdamW's formula (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), for all devices: they compute
// the same bits. Each fma is explicit, so that no compiler changes them.
#pragma once

#include <cmath>
#include <cstdint>

#include "llmc/core/error.h"
#include "llmc/core/host_device.h"
#include "llmc/device/ops.h"

namespace llmc {

// The numbers that change from step to step. They are computed in fp64 and rounded to fp32 once, since 1 - beta and
// 1 - beta^step lose precision by cancellation in fp32.
struct AdamWCoefficients {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    float step_size;         // learning rate / (1 - beta1^step)
    float root_correction2;  // sqrt(1 - beta2^step)
    double learning_rate;
    double max_grad_norm;
    double loss_scale;
    std::uint64_t step;
};

inline AdamWCoefficients adamw_coefficients(const AdamWStep& step) {
    check(step.step >= 1, "AdamW's steps count from 1");
    const auto steps = static_cast<double>(step.step);
    return {.beta1 = static_cast<float>(step.beta1),
            .beta2 = static_cast<float>(step.beta2),
            .one_minus_beta1 = static_cast<float>(1.0 - step.beta1),
            .one_minus_beta2 = static_cast<float>(1.0 - step.beta2),
            .eps = static_cast<float>(step.eps),
            .step_size = static_cast<float>(step.learning_rate / (1.0 - std::pow(step.beta1, steps))),
            .root_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(step.beta2, steps))),
            .learning_rate = step.learning_rate,
            .max_grad_norm = step.max_grad_norm,
            .loss_scale = step.loss_scale,
            .step = static_cast<std::uint64_t>(step.step)};
}

// min(1, max_grad_norm / (norm / S + 1e-6)) / S, with the loss scale S of the gradients
LLMC_HOST_DEVICE inline float adamw_clip(double norm_squared, const AdamWCoefficients& k) {
    float clip = 1;
    if (k.max_grad_norm > 0) {
        const double norm = std::sqrt(norm_squared) / k.loss_scale;
        clip = static_cast<float>(std::fmin(1.0, k.max_grad_norm / (norm + 1e-6)));
    }
    return static_cast<float>(clip / k.loss_scale);
}

// 1 - lr decay
LLMC_HOST_DEVICE inline float adamw_keep(double learning_rate, double weight_decay) {
    return static_cast<float>(std::fma(-learning_rate, weight_decay, 1.0));
}

// Updates one element.
LLMC_HOST_DEVICE inline void adamw_update(float& w, float& m, float& v, float gradient, float clip,
                                          float keep, const AdamWCoefficients& k) {
    const float g = clip * gradient;
    m = std::fma(k.beta1, m, k.one_minus_beta1 * g);
    v = std::fma(k.beta2, v, k.one_minus_beta2 * g * g);
    const float denominator = std::sqrt(v) / k.root_correction2 + k.eps;
    w = std::fma(w, keep, -k.step_size * (m / denominator));
}

}  // namespace llmc
