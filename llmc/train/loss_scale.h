// Loss scaling for fp16 (Micikevicius et al. 2018, "Mixed precision training"): the loss is multiplied by S, a power
// of two, so that few gradients of activations lie below fp16's 2^-24. If one overflows, the gradient's norm is not
// finite; the step is skipped, and S halved.
#pragma once

#include <cstdint>

#include "llmc/io/checkpoint.h"
#include "llmc/train/options.h"

namespace llmc {

inline constexpr std::int64_t most_loss_scale = std::int64_t{1} << 60;

class LossScaler {
  public:
    // The options must be complete. The scale is 1 unless they compute in fp16.
    explicit LossScaler(const Options& options);

    bool scales() const { return scales_; }
    // Whether a step whose gradient is not finite is skipped: in fp16, and with products in 8 bits.
    bool skips() const { return scales_ || is_fp8_; }
    double scale() const { return static_cast<double>(state_.scale); }
    // For checkpoints; nothing if the scale is fixed or there is none.
    std::optional<LossScale> state() const { return is_dynamic_ ? std::optional(state_) : std::nullopt; }
    std::int64_t skipped_in_a_row() const { return skipped_in_a_row_; }
    void restore(const std::optional<LossScale>& state, std::int64_t skipped_in_a_row);

    // A step that was applied.
    void see_good_step();
    // A step that was skipped since its gradient overflowed. UserError, which names `step`, if the scale cannot shrink:
    // it is 1, or there is none or a fixed one in the tenth skipped step in a row.
    void see_overflow(std::int64_t step);

  private:
    bool scales_, is_dynamic_, is_fp8_;
    std::int64_t window_, hysteresis_;
    std::int64_t skipped_in_a_row_ = 0;
    LossScale state_;
};

}  // namespace llmc
