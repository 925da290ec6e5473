// Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024), as torch.optim.Muon computes
// it, for the matrices of the layers' products:
//   m = mu m + (1 - mu) g;  u = mu m + (1 - mu) g (Nesterov)
//   w = w (1 - lr decay) - lr f orthogonal(u)
// orthogonal() is about U V^T of u's singular value decomposition (parallel/step/orthogonal.h). f is
// 0.2 sqrt(max(rows, columns)), with which an update has the size of AdamW's (Liu et al., "Muon is scalable for LLM
// training", 2025), or the original sqrt(max(1, rows/columns)).
#pragma once

#include <algorithm>
#include <cmath>

#include "llmc/core/host_device.h"
#include "llmc/optim/adamw.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/update.h"

namespace llmc {

inline constexpr std::array<std::string_view, 2> muon_scales = {"match_rms_adamw", "original"};
inline constexpr std::array muon_state = {StateTensor{"momentum_buffer", "momentum"}};
inline constexpr std::array muon_numbers = {
    Hyperparameter{"muon-momentum", "decay the momentum by N per step", 0.95, 0, below_one},
    Hyperparameter{"muon-lr", "use this rate for matrices; 0: that of --lr", 0, 0, greatest_number},
    Hyperparameter{"muon-scale",
                   "multiply the rate of a matrix to match AdamW's updates, or as first published", 0, 0, 1,
                   false, muon_scales}};

inline double muon_rate_factor(double rows, double columns, const HyperparameterValues& numbers) {
    return numbers[2] == 0 ? 0.2 * std::sqrt(std::max(rows, columns))
                           : std::sqrt(std::max(1.0, rows / columns));
}
inline double muon_rate(double learning_rate, const HyperparameterValues& numbers) {
    return numbers[1] > 0 ? numbers[1] : learning_rate;
}

inline constexpr Optimizer muon = {.kind = OptimizerKind::muon,
                                   .name = "muon",
                                   .state = muon_state,
                                   .hyperparameters = muon_numbers,
                                   .others = &adamw,
                                   .rate_factor = muon_rate_factor,
                                   .own_rate = muon_rate,
                                   .own_rate_name = "muon-lr"};

// The first line of the formula, of an element.
struct MuonMomentum {
    float keep, take;  // mu, 1 - mu

    static MuonMomentum of(const UpdateStep& step) {
        return {.keep = static_cast<float>(step.numbers[0]),
                .take = static_cast<float>(1.0 - step.numbers[0])};
    }
    LLMC_HOST_DEVICE static float decay(double /*learning_rate*/, double /*weight_decay*/) { return 0; }

    LLMC_HOST_DEVICE float update(float g, float& m) const {
        m = std::fma(keep, m, take * g);
        return std::fma(keep, m, take * g);
    }
};

// The numbers of orthogonal(): X = a X + (b A + c A A) X with A = X X^T, five times.
struct MuonIteration {
    static constexpr int steps = 5;
    static constexpr float a = 3.4445F, b = -4.7750F, c = 2.0315F;
};

// s of Combine, and its element.
LLMC_HOST_DEVICE inline float inverse_norm(double norm_squared) {
    return static_cast<float>(1.0 / std::fmax(std::sqrt(norm_squared), 1e-7));
}
LLMC_HOST_DEVICE inline float combined(float a, float x, float b, float y, float s) {
    return std::fma(a, x, b * y) * s;
}

// The second line: g is an element of orthogonal(u).
struct Muon {
    static constexpr const Optimizer& description = muon;
    static constexpr int states = 0;
    static constexpr double flops = 3;  // of an element

    float step_size;

    static Muon of(const UpdateStep& step) { return {.step_size = static_cast<float>(step.learning_rate)}; }
    LLMC_HOST_DEVICE static float decay(double learning_rate, double weight_decay) {
        return share_kept(learning_rate, weight_decay);
    }

    LLMC_HOST_DEVICE void update(float& w, float g, const UpdateRates& rates) const {
        w = std::fma(w, rates.decay, -(step_size * rates.factor) * g);
    }
};

}  // namespace llmc
