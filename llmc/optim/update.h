// What the formulas of all optimizers have in common. All devices compute the same bits: each fma is explicit, so that
// no compiler changes them.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "llmc/core/host_device.h"
#include "llmc/optim/optimizer.h"

namespace llmc {

// Limits of hyperparameters: formulas compute in fp32.
inline constexpr double below_one = 0x1.fffffep-1, least_number = std::numeric_limits<float>::min(),
                        greatest_number = std::numeric_limits<float>::max();

// The numbers of a step, for kernels.
template <class Formula>
struct StepNumbers {
    Formula formula;
    double learning_rate, max_grad_norm, loss_scale;
    std::uint64_t step;

    static StepNumbers of(const UpdateStep& step) {
        return {Formula::of(step), step.learning_rate, step.max_grad_norm, step.loss_scale,
                static_cast<std::uint64_t>(step.step)};
    }

    // The factor of gradients: min(1, max_grad_norm / (norm / S + 1e-6)) / S, with their loss scale S.
    LLMC_HOST_DEVICE float clip(double norm_squared) const {
        float clip = 1;
        if (max_grad_norm > 0) {
            const double norm = std::sqrt(norm_squared) / loss_scale;
            clip = static_cast<float>(std::fmin(1.0, max_grad_norm / (norm + 1e-6)));
        }
        return static_cast<float>(clip / loss_scale);
    }
    LLMC_HOST_DEVICE UpdateRates rates(double weight_decay, double factor) const {
        return {Formula::decay(learning_rate, weight_decay), static_cast<float>(factor)};
    }
};

// 1 - lr decay
LLMC_HOST_DEVICE inline float share_kept(double learning_rate, double weight_decay) {
    return static_cast<float>(std::fma(-learning_rate, weight_decay, 1.0));
}

}  // namespace llmc
