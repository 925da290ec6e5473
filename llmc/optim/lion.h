// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023):
//   w = w (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g
// sign(0) is 0. All updates have the size of the rate, so it is three to ten times smaller than AdamW's, and the decay
// as many times larger.
#pragma once

#include <cmath>

#include "llmc/core/host_device.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/update.h"

namespace llmc {

inline constexpr std::array lion_state = {StateTensor{"exp_avg", "momentum"}};
inline constexpr std::array lion_numbers = {
    Hyperparameter{"beta1", "take N of the momentum, and the rest of the gradient, for the sign", 0.9, 0,
                   below_one},
    Hyperparameter{"beta2", "decay the momentum by N per step", 0.99, 0, below_one}};
inline constexpr Optimizer lion = {.kind = OptimizerKind::lion,
                                   .name = "lion",
                                   .state = lion_state,
                                   .hyperparameters = lion_numbers,
                                   .learning_rate = 0.2,
                                   .weight_decay = 5};

struct Lion {
    static constexpr const Optimizer& description = lion;
    static constexpr int states = 1;
    static constexpr double flops = 10;  // of an element

    float beta1, beta2, one_minus_beta1, one_minus_beta2;
    float step_size;

    static Lion of(const UpdateStep& step) {
        const auto [beta1, beta2, unused1, unused2] = step.numbers;
        return {.beta1 = static_cast<float>(beta1),
                .beta2 = static_cast<float>(beta2),
                .one_minus_beta1 = static_cast<float>(1.0 - beta1),
                .one_minus_beta2 = static_cast<float>(1.0 - beta2),
                .step_size = static_cast<float>(step.learning_rate)};
    }

    LLMC_HOST_DEVICE static float decay(double learning_rate, double weight_decay) {
        return share_kept(learning_rate, weight_decay);
    }

    LLMC_HOST_DEVICE void update(float& w, float g, const UpdateRates& rates, float& m) const {
        const float u = std::fma(beta1, m, one_minus_beta1 * g);
        const float sign = static_cast<float>(u > 0) - static_cast<float>(u < 0);
        w = std::fma(w, rates.decay, -(step_size * rates.factor) * sign);
        m = std::fma(beta2, m, one_minus_beta2 * g);
    }
};

}  // namespace llmc
