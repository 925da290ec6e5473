// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), as PyTorch computes it. With the bias
// corrections b1, b2 = 1 - beta^step:
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   w = w (1 - lr decay) - lr/b1 m / (sqrt(v)/sqrt(b2) + eps)
#pragma once

#include <cmath>
#include <cstddef>

#include "llmc/core/host_device.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/update.h"

namespace llmc {

inline constexpr std::array adamw_state = {StateTensor{"exp_avg", "first moment"},
                                           StateTensor{"exp_avg_sq", "second moment", false}};
inline constexpr std::array adamw_numbers = {
    Hyperparameter{"beta1", "decay the first moment by N per step", 0.9, 0, below_one},
    Hyperparameter{"beta2", "decay the second moment by N per step", 0.95, 0, below_one},
    Hyperparameter{"eps", "add N to the square root of the second moment", 1e-8, least_number,
                   greatest_number}};
// Version 0.1 stored small second moments in 8 bits as 0, whose update would be lr m/eps. With the square of the first
// moment it is about the learning rate.
inline void mend_adamw(LoadedState& loaded) {
    auto& [first, second] = loaded;
    for (std::size_t i = 0; i < second.size(); ++i)
        if (second[i] == 0) second[i] = first[i] * first[i];
}

inline constexpr Optimizer adamw = {.kind = OptimizerKind::adamw,
                                    .name = "adamw",
                                    .state = adamw_state,
                                    .hyperparameters = adamw_numbers,
                                    .mend = mend_adamw};

// The numbers of a step. They are computed in fp64 and rounded to fp32 once, since 1 - beta and 1 - beta^step lose
// precision by cancellation in fp32.
struct AdamW {
    static constexpr const Optimizer& description = adamw;
    static constexpr int states = 2;
    static constexpr double flops = 15;  // of an element

    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    float step_size;         // lr/b1
    float root_correction2;  // sqrt(b2)

    static AdamW of(const UpdateStep& step) {
        const auto [beta1, beta2, eps, unused] = step.numbers;
        const auto steps = static_cast<double>(step.step);
        return {.beta1 = static_cast<float>(beta1),
                .beta2 = static_cast<float>(beta2),
                .one_minus_beta1 = static_cast<float>(1.0 - beta1),
                .one_minus_beta2 = static_cast<float>(1.0 - beta2),
                .eps = static_cast<float>(eps),
                .step_size = static_cast<float>(step.learning_rate / (1.0 - std::pow(beta1, steps))),
                .root_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, steps)))};
    }

    LLMC_HOST_DEVICE static float decay(double learning_rate, double weight_decay) {
        return share_kept(learning_rate, weight_decay);
    }

    LLMC_HOST_DEVICE void update(float& w, float g, const UpdateRates& rates, float& m, float& v) const {
        m = std::fma(beta1, m, one_minus_beta1 * g);
        v = std::fma(beta2, v, one_minus_beta2 * g * g);
        const float denominator = std::sqrt(v) / root_correction2 + eps;
        w = std::fma(w, rates.decay, -(step_size * rates.factor) * (m / denominator));
    }
};

}  // namespace llmc
