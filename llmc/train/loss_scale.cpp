#include "llmc/train/loss_scale.h"

#include <algorithm>
#include <bit>

#include "llmc/core/error.h"

namespace llmc {

namespace {

// Our scale multiplies the mean over the tokens of a step: the gradients of a token are smaller by their number.
std::int64_t first_scale(const Options& options) {
    constexpr std::int64_t least = 65536;
    const auto tokens = std::bit_ceil(static_cast<std::uint64_t>(*options.global_batch_tokens));
    return std::clamp(static_cast<std::int64_t>(tokens), least, most_loss_scale);
}

}  // namespace

LossScaler::LossScaler(const Options& options)
    : scales_(options.compute_dtype() == DType::fp16),
      is_dynamic_(scales_ && !options.loss_scale),
      is_fp8_(options.fp8_scaling() != Fp8Scaling::none),
      window_(options.loss_scale_window),
      hysteresis_(options.loss_scale_hysteresis),
      state_{.hysteresis_left = options.loss_scale_hysteresis} {
    if (scales_)
        state_.scale = options.loss_scale.value_or(options.initial_loss_scale.value_or(first_scale(options)));
}

void LossScaler::restore(const std::optional<LossScale>& state, std::int64_t skipped_in_a_row) {
    skipped_in_a_row_ = skipped_in_a_row;
    if (is_dynamic_ && state) state_ = *state;
}

void LossScaler::see_good_step() {
    skipped_in_a_row_ = 0;
    if (!is_dynamic_ || ++state_.good_steps < window_) return;
    state_.good_steps = 0;
    state_.hysteresis_left = hysteresis_;
    state_.scale = std::min(2 * state_.scale, most_loss_scale);
}

void LossScaler::see_overflow(std::int64_t step) {
    constexpr std::int64_t most_in_a_row = 10;
    ++skipped_in_a_row_;
    if (!is_dynamic_) {
        if (skipped_in_a_row_ >= most_in_a_row && is_fp8_)
            user_error(
                "step {}: the gradient was not finite in {} steps in a row with products in 8 bits; give "
                "--fp8 none, or "
                "a smaller --lr",
                step, most_in_a_row);
        if (skipped_in_a_row_ >= most_in_a_row)
            user_error(
                "step {}: the gradient overflowed in {} steps in a row at --loss-scale {}; give a smaller "
                "one, or none, "
                "or --dtype bf16",
                step, most_in_a_row, state_.scale);
        return;
    }
    state_.good_steps = 0;
    if (state_.hysteresis_left > 1) {
        --state_.hysteresis_left;
        return;
    }
    if (state_.scale == 1)
        user_error(
            "step {}: the gradient overflows fp16 even at a loss scale of 1; give --dtype bf16, or a smaller "
            "--lr",
            step);
    state_.scale /= 2;
}

}  // namespace llmc
