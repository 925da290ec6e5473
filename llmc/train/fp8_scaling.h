// Delayed scaling of products in 8 bits (Micikevicius et al. 2022, "FP8 formats for deep learning"): an operand is
// scaled by the greatest magnitude that it had in the last steps. The magnitudes are those over all ranks and
// micro-batches, so no scale depends on the mesh.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "llmc/io/checkpoint.h"
#include "llmc/model/model.h"
#include "llmc/train/options.h"

namespace llmc {

class Fp8Scaler {
  public:
    // The options must be complete. It does nothing unless they ask for delayed scaling.
    Fp8Scaler(const Options& options, const Outline& outline);

    bool is_delayed() const { return is_delayed_; }
    // The greatest magnitude by which each operand is scaled (first_amax).
    std::span<const float> amax() const { return state_.amax; }
    // For checkpoints; nothing without delayed scaling.
    std::optional<Fp8History> state() const { return is_delayed_ ? std::optional(state_) : std::nullopt; }

    // Begins without a history: matrices are scaled by their own greatest magnitude, `of_weights`; inputs not at all;
    // gradients by the power of two at or above the tokens of a step, since they are of the mean over these tokens.
    void begin(std::span<const float> of_weights);
    // Goes on with the history of a checkpoint. False if that has none of this model.
    bool restore(const std::optional<Fp8History>& history);
    // A step that was applied: each operand is scaled by the greatest magnitude of its last --fp8-history steps. One
    // that was always 0 keeps its scale.
    void see(std::span<const float> recorded);

  private:
    bool is_delayed_;
    std::size_t length_;
    std::int64_t tokens_;
    std::size_t operands_;
    Fp8History state_;
};

}  // namespace llmc
