// Stochastic gradient descent with momentum, as PyTorch computes it: the decay is a part of the gradient.
//   g = g + decay w;  m = momentum m + g;  w = w - lr m, or with Nesterov's momentum w - lr (g + momentum m)
#pragma once

#include <cmath>

#include "llmc/core/host_device.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/update.h"

namespace llmc {

inline constexpr std::array sgd_state = {StateTensor{"momentum_buffer", "momentum"}};
inline constexpr std::array sgd_numbers = {
    Hyperparameter{"momentum", "decay the momentum by N per step", 0.9, 0, below_one},
    Hyperparameter{"nesterov", "look ahead by one step of the momentum (Nesterov)", 0, 0, 1, true}};
// Without the division by the root of the second moment, gradients need a larger rate, whose decay is as much smaller.
inline constexpr Optimizer sgd = {.kind = OptimizerKind::sgd,
                                  .name = "sgd",
                                  .state = sgd_state,
                                  .hyperparameters = sgd_numbers,
                                  .learning_rate = 100,
                                  .weight_decay = 1e-3};

struct Sgd {
    static constexpr const Optimizer& description = sgd;
    static constexpr int states = 1;
    static constexpr double flops = 8;  // of an element

    float momentum;
    float step_size;
    bool nesterov;

    static Sgd of(const UpdateStep& step) {
        const auto [momentum, nesterov, unused1, unused2] = step.numbers;
        return {.momentum = static_cast<float>(momentum),
                .step_size = static_cast<float>(step.learning_rate),
                .nesterov = nesterov != 0};
    }

    LLMC_HOST_DEVICE static float decay(double /*learning_rate*/, double weight_decay) {
        return static_cast<float>(weight_decay);
    }

    LLMC_HOST_DEVICE void update(float& w, float g, const UpdateRates& rates, float& m) const {
        g = std::fma(rates.decay, w, g);
        m = std::fma(momentum, m, g);
        const float u = nesterov ? std::fma(momentum, m, g) : m;
        w = std::fma(-(step_size * rates.factor), u, w);
    }
};

}  // namespace llmc
