#include "llmc/train/fp8_scaling.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "llmc/core/error.h"
#include "llmc/device/fp8.h"

namespace llmc {

Fp8Scaler::Fp8Scaler(const Options& options, const Outline& outline)
    : is_delayed_(options.fp8_scaling() == Fp8Scaling::delayed),
      length_(static_cast<std::size_t>(options.fp8_history)),
      tokens_(*options.global_batch_tokens),
      operands_(is_delayed_ ? static_cast<std::size_t>(first_amax(outline).back()) : 0) {}

void Fp8Scaler::begin(std::span<const float> of_weights) {
    check(of_weights.size() == operands_, "an amax for each operand");
    const auto power = static_cast<float>(std::bit_ceil(static_cast<std::uint64_t>(tokens_)));
    state_ = {.amax = std::vector<float>(operands_), .seen = {}};
    for (std::size_t i = 0; i < operands_; ++i) {
        switch (static_cast<Fp8Operand>(i % fp8_operands)) {
            case Fp8Operand::input:
                state_.amax[i] = format_of(Fp8::e4m3).largest;
                break;
            case Fp8Operand::matrix:
                state_.amax[i] = of_weights[i];
                break;
            case Fp8Operand::gradient:
                state_.amax[i] = format_of(Fp8::e5m2).largest / power;
                break;
        }
    }
}

bool Fp8Scaler::restore(const std::optional<Fp8History>& history) {
    if (!history || history->amax.size() != operands_) return false;
    state_ = *history;
    return true;
}

void Fp8Scaler::see(std::span<const float> recorded) {
    check(recorded.size() == operands_, "an amax for each operand");
    state_.seen.emplace_back(recorded.begin(), recorded.end());
    while (state_.seen.size() > length_) state_.seen.erase(state_.seen.begin());
    for (std::size_t i = 0; i < operands_; ++i) {
        float greatest = 0;
        for (const std::vector<float>& step : state_.seen) greatest = std::max(greatest, step[i]);
        if (greatest > 0 && std::isfinite(greatest)) state_.amax[i] = greatest;
    }
}

}  // namespace llmc
